"""Which schedule to run next, for "auto": try the best plans in real steps, keep the fastest, and look for drift.

    measure   two steps as planned; what the second one shows becomes the costs
    search    for these costs, in a thread, while steps go on
    try       the few best plans and the one that runs, each in two rounds of three steps
    again     search and try once more, with what these steps have shown
    keep      the fastest, as measured; then look now and then whether stages still cost what they did. If not: search

Every step trains. The gradients are the same whatever the order.

Ranks do not ask each other what to do. What decides is measured times alone, which all ranks get alike, and get at the
same step: some steps after they were taken, so that nobody waits for them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from sternway.schedule import Costs, Schedule, Timeline, candidates, measured_costs

Measured = Callable[[], Timeline]
"""Waits for the times of all ranks in a step."""

_PLANS = 3, 2  # that are tried at a time, at first and again
_ROUNDS = 2
_LATER = 2  # steps after which the times of a step are looked at
_CALM, _CALMEST = 3, 96  # steps between two looks for drift, at first and at most
_DRIFT = 0.1  # a stage's share of the work may change by this part of it


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A schedule that "auto" has run.

    Attributes:
        step: the step in which it ran first.
        schedule: the schedule.
        planned: seconds of a step among others, by simulation with the costs that it was chosen for.
        measured: the same, as measured: the median.
        kept: whether it was the fastest of those that were tried with it.
    """

    step: int
    schedule: Schedule
    planned: float
    measured: float
    kept: bool

    def __str__(self) -> str:
        times = f"planned {1e3 * self.planned:.2f} ms, measured {1e3 * self.measured:.2f} ms"
        return f"step {self.step}: {self.schedule.name}, {times}{', kept' if self.kept else ''}"


class Tuner:
    """The story of one pipeline's plans, as a function of measured times.

    Args:
        schedule: the first plan.
        costs: those that it was planned for.
        memory_limit: of every plan, in forwards of one microbatch through one rank's share.
        fits: whether a plan is allowed; all within the limit are by default.

    Attributes:
        schedule: the plan of the next step.
        costs: what the stages cost, as far as is known.
        plans: what was tried.
        stopped: whether the plan stays from now on.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        memory_limit: float | Sequence[float],
        fits: Callable[[Schedule], bool] | None = None,
    ) -> None:
        self.schedule, self.costs, self.plans = schedule, costs, list[TriedPlan]()
        self.stopped, self._kept = False, schedule
        self._limit, self._fits, self._step = memory_limit, fits, 0
        self._story = self._tell()
        next(self._story)

    def note(self, measured: Measured) -> None:
        """A step has run; these are its times. Afterwards ``schedule`` is the next step's."""
        self._step += 1
        self.schedule = self._story.send(measured)

    def stop(self) -> None:
        """Keep the best plan so far from now on."""
        self.stopped, self.schedule = True, self._kept

    def _tell(self) -> Generator[Schedule, Measured, None]:
        calm, before = _CALM, None
        yield self.schedule  # the first step of all loads kernels and allocates memory
        while True:
            measured = yield self.schedule
            yield from self._wait()
            self.costs = measured_costs(measured(), self.costs)
            for count in _PLANS:
                found = _in_thread(functools.partial(self._candidates, count))
                yield from self._wait()
                yield from self._try(found.result())
            calm = (
                min(2 * calm, _CALMEST) if self.schedule == before else _CALM
            )  # a search for nothing: look less often
            before = self.schedule
            yield from self._until_drift(calm)

    def _candidates(self, count: int) -> list[Schedule]:
        return candidates(self.schedule, self.costs, memory_limit=self._limit, count=count, fits=self._fits)

    def _wait(self) -> Generator[Schedule, Measured, None]:
        for _ in range(_LATER):
            yield self.schedule

    def _try(self, plans: list[Schedule]) -> Generator[Schedule, Measured, None]:
        """Run each plan in some steps; afterwards ``schedule`` is the fastest."""
        if self.schedule not in plans:
            plans = [*plans, self.schedule]
        if len(plans) == 1:
            return
        first = [self._step + 3 * index for index in range(len(plans))]
        waits: list[tuple[int, Measured]] = []
        for _ in range(_ROUNDS):
            for index, plan in enumerate(plans):
                yield plan  # what is new in an order is prepared in its first step
                waits.append((index, (yield plan)))
                waits.append((index, (yield plan)))
        yield from self._wait()
        runs = [(index, measured()) for index, measured in waits]
        spans = [statistics.median(run.span for which, run in runs if which == index) for index in range(len(plans))]
        best = spans.index(min(spans))
        self.plans += [
            TriedPlan(step, plan, plan.simulate(self.costs).period, span, kept=index == best)
            for index, (step, plan, span) in enumerate(zip(first, plans, spans, strict=True))
        ]
        self.schedule = self._kept = plans[best]
        self.costs = measured_costs([run for _, run in runs], self.costs)

    def _until_drift(self, calm: int) -> Generator[Schedule, Measured, None]:
        """Run the same plan until two steps in a row show other costs than the first of them."""
        usual = None
        while True:
            for _ in range(calm):
                yield self.schedule
            looks = [(yield self.schedule), (yield self.schedule)]
            yield from self._wait()
            shares = [_shares(measured_costs(measured(), self.costs), self.schedule) for measured in looks]
            if usual is None:
                usual = [sum(pair) / 2 for pair in zip(*shares, strict=True)]
            elif all(_differ(usual, now) for now in shares):
                return


def _shares(costs: Costs, schedule: Schedule) -> list[float]:
    """Each stage's part of all work: it stays the same if all stages become slower alike."""
    per_stage = costs.per_stage(schedule.placement)
    work = [sum(times) for times in zip(per_stage.F, per_stage.I, per_stage.W, strict=True)]
    total = sum(work) or 1.0
    return [each / total for each in work]


def _differ(usual: list[float], now: list[float]) -> bool:
    return any(abs(new - old) > _DRIFT * max(old, new) for old, new in zip(usual, now, strict=True))


def _in_thread(call: Callable[[], list[Schedule]]) -> Future[list[Schedule]]:
    found: Future[list[Schedule]] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:
            found.set_exception(error)

    Thread(target=run, name="sternway-search", daemon=True).start()
    return found
