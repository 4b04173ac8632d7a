"""What the stages of a whole model cost, before its plan is chosen: measured on the sample, alike on all ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from sternway._storage import storage_bytes
from sternway.errors import SternwayError
from sternway.pipeline.build._blocks import blocks_of, recomputing
from sternway.pipeline.build._link import LinkSpeed
from sternway.pipeline.build._partition import Layout
from sternway.pipeline.build._profile import Profile, profile
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.transport._crew import Outcome
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Share


def measure(request: BuildRequest, model: nn.Module, layout: Layout, transport: Transport) -> Profile | None:
    """What the first rank measured, on all ranks, so that all decide alike; None if it has no sample.

    All ranks with a sample measure at the same time, as they will train: cores share caches and memory. Copies of the
    pipeline take what the first one measured: they average stage after stage, in the order of one schedule.
    """

    def run() -> Profile | None:
        if request.sample is None:
            return None
        loss_fn = request.loss_fn if request.sample_target is not None else None
        starts = range(len(layout.names))

        def timed() -> Profile:
            calls = layout.cut(model, starts).parts()
            return profile(calls, request.sample, loss_fn=loss_fn, target=request.sample_target)

        found = replace(timed(), names=tuple(layout.names))
        if request.memory is None:
            return found
        much = {place: Share(0.0, 1.0) for place, blocks in enumerate(blocks_of(model, layout, starts)) if blocks}
        try:
            with recomputing(model, layout, starts, much):
                again = timed()
        except SternwayError:  # from blocks that cannot run again
            return found
        return replace(found, selective=_longer(found, again, much))

    crew = transport.crew() if request.everyone is None else transport.crew_apart(request.everyone)
    found = crew.share(Outcome(run))[0].result()
    if found is None:
        return None
    empty, full = transport.delay(1), transport.delay(max(found.sent_bytes))
    busy = max(0.0, full - empty) / full if full else 0.0
    comm, comm_busy = crew.share((full, busy))[0]
    return replace(found, comm=comm, comm_busy=comm_busy)


def _longer(plain: Profile, again: Profile, places: Collection[int]) -> tuple[float, ...]:
    """How much longer F and B of some modules take than they did."""
    both = [[f + b for f, b in zip(each.F, each.B, strict=True)] for each in (plain, again)]
    return tuple(
        max(0.0, later - before) if place in places else 0.0
        for place, (before, later) in enumerate(zip(*both, strict=True))
    )


def agreed_costs(
    request: BuildRequest,
    model: nn.Module,
    layout: Layout,
    ways: list[list[int]],
    measured: Profile | None,
    transport: Transport,
) -> list[Costs]:
    """For each way to cut, what its stages cost, on all ranks alike; with gathering, if they will be sharded."""
    if measured is None:
        return [Costs()] * len(ways)
    costs_of = [measured.grouped(way).costs for way in ways]
    if request.link is None or request.everyone is None or request.schedule != "auto":
        return costs_of
    sizes = [[float(storage_bytes(part.parameters())) for part in layout.cut(model, way).parts()] for way in ways]
    own = request.link.measure(max(map(max, sizes)), transport.device)
    speed = LinkSpeed.slowest(transport.crew_apart(request.everyone).share(own))
    return [speed.priced(costs, each) for costs, each in zip(costs_of, sizes, strict=True)]
