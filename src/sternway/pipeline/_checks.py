"""What must hold before a pipeline is built and before each step: on every rank, and alike on all."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from sternway.errors import PipelineError
from sternway.pipeline._build import Built
from sternway.pipeline._microbatch import Chunk, Presplit, Replicate
from sternway.pipeline._payload import pack
from sternway.pipeline._stage import Microbatch
from sternway.pipeline._transport import Transport
from sternway.schedule import Schedule


def check_arguments(
    stages: Any,
    schedule: Any,
    n_microbatches: Any,
    ranks: Any,
    transport: Any,
    chunk: Any,
    loss_fn: Any,
    reports: Any,
    mesh: Any,
) -> None:
    """What a pipeline is given is of the right kind."""
    rules: list[tuple[bool, str, Any]] = [
        (isinstance(stages, Mapping | nn.Module), "stages are {index: module}, or a whole model", stages),
        (isinstance(schedule, Schedule | str), "a schedule is a Schedule, the name of one, or auto", schedule),
        (_counts(n_microbatches), "n_microbatches is a number from 1 on", n_microbatches),
        (_counts(ranks), "ranks is a number from 1 on", ranks),
        (isinstance(transport, Transport | None), "a transport is a Transport", transport),
        (isinstance(chunk, Chunk | Presplit | Replicate), "chunk is Chunk(dim), Presplit() or Replicate()", chunk),
        (loss_fn is None or callable(loss_fn), "loss_fn must be a function of output and target", loss_fn),
        (mesh is None or hasattr(mesh, "get_group"), "mesh is a DeviceMesh", mesh),
        (reports is None or isinstance(reports, str | os.PathLike), "reports is a folder", reports),
    ]
    for fits, rule, value in rules:
        if not fits:
            raise PipelineError(rule, got=f"{type(value).__name__} {value!r:.80}", fix="see the arguments of Pipeline")


def _counts(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


def check_policy(policy: Any, optional: bool = True) -> None:
    """What is to happen where gradients are not finite."""
    if policy not in ("raise", "skip") and not (optional and policy is None):
        raise PipelineError('nonfinite is "raise" or "skip"', got=repr(policy), fix='pass nonfinite="skip"')


def check_places(built: Built, ranks: int, transport: Transport) -> None:
    """The schedule is whole, is for these ranks, and places on them just the stages that are here."""
    plan = built.schedule.check()
    if plan.ranks != ranks:
        raise PipelineError(
            f"the schedule {plan.name} is for {plan.ranks} ranks", got=f"{ranks} ranks", fix="make it for as many"
        )
    for rank in transport.mine or range(ranks):
        missing = [stage for stage in plan.placement[rank] if stage not in built.modules]
        if missing:
            raise PipelineError(
                f"rank {rank} holds the stages {list(plan.placement[rank])}, as {plan.name} places them",
                got=f"no stage {missing[0]}, but {sorted(built.modules)}",
                fix="pass {index: module} for each of them",
            )
    mine = {stage for rank in transport.mine or range(ranks) for stage in plan.placement[rank]}
    extra = sorted(built.modules.keys() - mine)
    if extra:
        raise PipelineError(
            f"{plan.name} places the stages {sorted(mine)} here", got=f"stage {extra[0]} too", fix="leave it out"
        )


def check_alike(facts: list[list[float]], schedule: Schedule) -> None:
    """All ranks run one schedule: the third of each rank's facts is its digest."""
    digests = [row[2] for row in facts]
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise PipelineError(
            "all ranks run one schedule",
            got=f"another on rank {other} than on rank 0; here {schedule.name} of {schedule.n_microbatches}",
            fix="build it from the same arguments on every rank",
        )


def checked_skips(skips: Mapping[str, tuple[int, int]], num_stages: int) -> dict[str, tuple[int, int]]:
    """The skips, if each leads from a stage to a later one."""
    PipelineError.unless(isinstance(skips, Mapping), "skips are {name: (from stage, to stage)}", skips, "pass a dict")
    for name, way in skips.items():
        fits = isinstance(name, str) and isinstance(way, tuple | list) and [type(part) for part in way] == [int, int]
        PipelineError.unless(fits, "skips are {name: (from stage, to stage)}", (name, way), "pass two stages' numbers")
        source, target = way
        if name == "main" or not 0 <= source < target < num_stages:
            raise PipelineError(
                f"a skip leads from a stage to a later one, of {num_stages}",
                got=f"{name}: from {source} to {target}",
                fix='name stages in order, and the skip anything but "main"',
            )
    return dict(skips)


def digest(text: str) -> int:
    """A number that differs where texts do, but for bad luck."""
    return zlib.crc32(text.encode())


def signature(batch: list[Microbatch]) -> int:
    """A number that changes when the shapes of a batch do."""
    spec = [pack([m.arguments, m.keywords, m.stage_kwargs])[0] for m in batch]
    return zlib.crc32(repr([[(t.shape, str(t.dtype)) for t in s.tensors] for s in spec]).encode())
