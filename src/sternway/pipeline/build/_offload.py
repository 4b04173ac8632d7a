"""Where microbatches go that a schedule takes off the device, and how fast the link to there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sternway._bytes import parse_bytes
from sternway.errors import PipelineError
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.transport._crew import Outcome
from sternway.pipeline.transport._transport import Transport
from sternway.saved import Offload, offload
from sternway.schedule import Schedule


def make_policies(to: str | Path | None, device: torch.device) -> Callable[[], Offload] | None:
    """What makes the policies that move microbatches to a folder, or to the host; None if there is nowhere to go."""
    if to is None and device.type == "cpu":
        return None
    target: dict[str, Any] = {"to": "cpu"} if to is None else {"to": "disk", "directory": to}
    return functools.partial(offload, budget=0, prefetch=0, min_bytes=0, **target)


def given_rate(rate: int | str | None, memory: int | str | None, *, movable: bool) -> int | None:
    """The bytes in a second that were passed.

    Raises:
        PipelineError: it is no size, or there is no plan that depends on it: nothing is ``movable``.
    """
    if rate is None:
        return None
    found = parse_bytes(rate, "offload_rate", PipelineError)
    if memory is None or not found:
        raise PipelineError(
            "offload_rate is for plans within memory=, and must be more than nothing",
            got=f"offload_rate={rate!r}, memory={memory!r}",
            fix="pass memory= too, or leave offload_rate out",
        )
    if not movable:
        raise PipelineError(
            "offload_rate is for stages that can be offloaded: not sharded, not captured, and on the CPU to a folder",
            got=f"offload_rate={rate!r}, and nowhere to go",
            fix="pass offload_to=, a folder on a disk, or leave offload_rate out",
        )
    return found


def agreed_rate(request: BuildRequest, transport: Transport) -> float | None:
    """The bytes in a second of the slowest rank's link, while all use theirs; None if nothing may be moved."""
    if request.offload is None or request.offload_rate is not None:
        return request.offload_rate
    make = request.offload

    def measure() -> float:
        policy = make()
        try:
            return policy.rate(transport.device)
        finally:
            policy.close()

    crew = transport.crew() if request.everyone is None else transport.crew_apart(request.everyone)
    return min(each.result() for each in crew.share(Outcome(measure)))


def moves(schedule: Schedule | str) -> bool:
    """Whether a schedule takes activations off the device."""
    return isinstance(schedule, Schedule) and any(schedule.moved(rank) for rank in range(schedule.ranks))


def check_offload(
    schedule: Schedule,
    to: str | Path | None,
    device: torch.device,
    *,
    cuda_graphs: bool,
    sharded: bool,
    chosen: bool,
) -> None:
    """Raise if what a schedule moves would not leave the device's memory, or cannot be moved.

    Args:
        schedule: the schedule.
        to: the folder, if any.
        device: where the stages are.
        cuda_graphs: whether they are captured.
        sharded: whether they are sharded.
        chosen: whether the pipeline itself chose what is moved, if anything.
    """
    if not moves(schedule):
        if to is not None and not chosen:
            raise PipelineError(
                "offload_to is for a schedule with OFFLOAD",
                got=schedule.name,
                fix="pass schedule.offloaded(…), or memory=, within which microbatches are offloaded if that helps",
            )
        if to is None:
            return
    if cuda_graphs or sharded:
        raise PipelineError(
            "a schedule with OFFLOAD cannot have captured or sharded stages",
            got="cuda_graphs=True" if cuda_graphs else "sharded stages",
            fix="leave it out, or pass a schedule without OFFLOAD, and no offload_to",
        )
    if device.type == "cpu" and to is None:
        raise PipelineError(
            "a schedule with OFFLOAD on the CPU needs a folder: its activations are in the host's memory already",
            got="offload_to=None",
            fix="pass offload_to=, a folder on a disk",
        )
