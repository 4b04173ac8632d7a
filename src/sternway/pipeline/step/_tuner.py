"""Which schedule to run next, for "auto": try the best plans in real steps, keep the fastest, and look for drift.

    measure   two steps as planned; what the second one shows becomes the costs
    search    for these costs, on the first rank in a process of its own, while steps go on
    try       the few best plans and the one that runs, in rounds of three steps each; those that are clearly slower are
              left out of the next round
    again     search once more, with what these steps have shown, and try what is new if that promises to be faster
    keep      the fastest, as measured; then look now and then whether stages still cost what they did. If not: search,
              and try if a better plan is found

Every step trains. The gradients are the same whatever the order.

Ranks do not ask each other what to do. What decides is measured times, and what the search of the first rank has found.
All ranks get these alike, and get them at the same step: some steps later, so that nobody waits for them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from sternway.pipeline.step._finder import Finder
from sternway.schedule import Costs, Schedule, Timeline, candidates, measured_costs

Measured = Callable[[], Timeline]
"""Waits for the times of all ranks in a step."""

Told = TypeVar("Told")
_Story: TypeAlias = Generator[Schedule, Measured | None, Told]
"""Yields the plan of the next step, and is sent what waits for its times, if they are wanted."""

_PLANS = 3, 2  # that are tried at a time, at first and again
_MORE = 2  # of sharded stages: a simulation knows little of gathering and reducing
_ROUNDS = 2, 4  # in which plans are compared, at least and at most
_CLEARLY = 0.04  # slower than the fastest by this part: not worth another round
_MANY = 100  # plans: all of them
_LATER = 2  # steps after which the times of a step are looked at
_CALM, _CALMEST = 3, 96  # steps between two looks for drift, at first and at most
_LOOKS = 3  # steps in a row that must show a drift
_DRIFT = 0.1  # a stage's share of the work may change by this part of it
_GAIN = 0.01  # by which a plan must be better, as planned, to be tried again or after a drift


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A schedule that "auto" has run.

    Attributes:
        step: the step in which it ran first.
        schedule: the schedule.
        planned: seconds of a step among others, by simulation with the costs that it was chosen for.
        measured: the same, as measured: the median.
        kept: whether it was the fastest of those that were tried with it.
        cause: why plans were tried: the first steps, or a stage that takes more or less of the work than before.
    """

    step: int
    schedule: Schedule
    planned: float
    measured: float
    kept: bool
    cause: str

    def __str__(self) -> str:
        times = f"planned {1e3 * self.planned:.2f} ms, measured {1e3 * self.measured:.2f} ms"
        return f"step {self.step}: {self.schedule.name}, {times}{', kept' if self.kept else ''} ({self.cause})"


class Tuner:
    """The story of one pipeline's plans, as a function of measured times.

    Args:
        schedule: the first plan.
        costs: those that it was planned for.
        memory_limit: of every plan, in forwards of one microbatch through one rank's share.
        fits: whether a plan is allowed; all within the limit are by default.
        gathered: how many of its sharded stages a rank keeps gathered; all by default.
        finder: does the searches; for this process alone by default.
        agree: makes the times of this pipeline those that all its copies decide by; None if there are no copies.

    Attributes:
        schedule: the plan of the next step.
        costs: what the stages cost, as far as is known.
        plans: what was tried.
        stopped: whether the plan stays from now on.
        looks: whether the times of the next step are wanted.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        memory_limit: float | Sequence[float],
        fits: Callable[[Schedule], bool] | None = None,
        gathered: int | None = None,
        finder: Finder | None = None,
        agree: Callable[[Measured], Measured] | None = None,
    ) -> None:
        self._gathered, self._agree = gathered, agree
        self.schedule, self.costs, self.plans = schedule, costs, list[TriedPlan]()
        self.stopped, self._kept, self._cause = False, schedule, "the first steps"
        self.looks = True
        self._finder = finder or Finder()
        self._limit, self._fits, self._step = memory_limit, fits, 0
        self._story = self._tell()
        next(self._story)

    def note(self, measured: Measured | None) -> None:
        """A step has run; these are its times, if they were wanted. Afterwards ``schedule`` is the next step's."""
        self._step += 1
        self.schedule = self._story.send(measured if measured is None or self._agree is None else self._agree(measured))

    def stop(self) -> None:
        """Keep the best plan so far from now on."""
        self.stopped, self.schedule = True, self._kept
        self._finder.stop()

    def _tell(self) -> _Story[None]:
        calm, more = _CALM, _MORE if self.schedule.gathered else 0
        yield self.schedule  # the first step of all loads kernels and allocates memory
        first = yield from self._look(1)
        yield from self._pass(_LATER)
        self.costs = measured_costs([measured() for measured in first], self.costs)
        yield from self._improve(more, anyway=True)
        while True:
            yield from self._until_drift(calm)
            before = self.schedule
            yield from self._improve(more, anyway=False)
            calm = min(2 * calm, _CALMEST) if self.schedule == before else _CALM  # for nothing: look less often

    def _improve(self, more: int, *, anyway: bool) -> _Story[None]:
        """Search, and try the best plans; then once more, with what these steps have shown.

        Plans are tried if the best is planned to gain something, at first also ``anyway``.
        """
        tried: list[Schedule] = []
        for number, count in enumerate(_PLANS):
            plans = yield from self._search()
            if not plans or (not (anyway and number == 0) and not self._gains(plans[0])):
                break
            tried += yield from self._try(plans[: count + more], tried)

    def _search(self) -> _Story[list[Schedule]]:
        """Run on until the search is done. The best plan is the first; none if it has failed."""
        plan, limit = self.schedule, self._limit
        gathered = self._gathered or max(map(len, plan.placement))
        self._finder.begin(
            functools.partial(candidates, plan, self.costs, memory_limit=limit, count=_MANY, gathered=gathered)
        )
        found = None
        while found is None:
            answer = self._finder.ask(
                lambda each: self._fits is None or each == plan or self._fits(each), max(_PLANS) + _MORE
            )
            yield from self._pass(_LATER)
            found = answer()
        return found

    def _gains(self, plan: Schedule) -> bool:
        return plan.simulate(self.costs).period < (1 - _GAIN) * self.schedule.simulate(self.costs).period

    def _pass(self, steps: int) -> _Story[None]:
        """Run on, and look at nothing."""
        self.looks = False
        for _ in range(steps):
            yield self.schedule
        self.looks = True

    def _look(self, steps: int, plan: Schedule | None = None) -> _Story[list[Measured]]:
        """Run some steps, by a plan that is tried or the one that is kept; what waits for the times of each."""
        found = []
        for _ in range(steps):
            measured = yield plan or self.schedule
            assert measured is not None, "it was wanted"
            found.append(measured)
        return found

    def _try(self, plans: list[Schedule], tried: list[Schedule]) -> _Story[list[Schedule]]:
        """Run each plan that is not ``tried`` yet in some steps. Afterwards ``schedule`` is the fastest.

        Returns:
            The plans that were run.
        """
        plans = [plan for plan in plans if plan not in tried and plan != self.schedule]
        if not plans:
            return []
        running = len(plans)  # which of equals is kept
        plans.append(self.schedule)
        first = [self._step + 3 * index for index in range(len(plans))]
        runs: list[list[Timeline]] = [[] for _ in plans]
        left = list(range(len(plans)))
        for done in range(1, _ROUNDS[1] + 1):
            waits = []
            for index in left:  # what is new in an order is prepared in its first step
                waits.append((index, (yield from self._look(3, plans[index]))[1:]))
            yield from self._pass(_LATER)
            for index, found in waits:
                runs[index] += [measured() for measured in found]
            times = [statistics.median(run.period for run in each) for each in runs]
            best = min(left, key=lambda index: (times[index], index != running))
            self.schedule = plans[best]
            if done >= _ROUNDS[0]:
                self._kept = self.schedule
                left = [index for index in left if times[index] <= (1 + _CLEARLY) * times[best]]
            if len(left) == 1:
                break
        self.plans += [
            TriedPlan(step, plan, plan.simulate(self.costs).period, time, index == best, self._cause)
            for index, (step, plan, time) in enumerate(zip(first, plans, times, strict=True))
        ]
        self.costs = measured_costs([run for each in runs for run in each], self.costs)
        return plans

    def _until_drift(self, calm: int) -> _Story[None]:
        """Run the same plan until some steps in a row show other costs than those that it was chosen for."""
        usual = _shares(self.costs, self.schedule)
        while True:
            yield from self._pass(calm)
            looks = yield from self._look(_LOOKS)
            yield from self._pass(_LATER)
            runs = [measured() for measured in looks]
            shares = [_shares(measured_costs(run, self.costs), self.schedule) for run in runs]
            changed = [stage for stage, old in enumerate(usual) if all(_differ(old, now[stage]) for now in shares)]
            if changed:
                break
        self.costs = measured_costs(runs, self.costs)
        now = _shares(self.costs, self.schedule)
        most = max(changed, key=lambda stage: abs(now[stage] - usual[stage]) / max(now[stage], usual[stage]))
        self._cause = f"stage {most} takes {now[most]:.1%} of the work, before {usual[most]:.1%}"


def _shares(costs: Costs, schedule: Schedule) -> list[float]:
    """Each stage's part of all work: it stays the same if all stages become slower alike."""
    per_stage = costs.per_stage(schedule.placement)
    work = [sum(times) for times in zip(per_stage.F, per_stage.I, per_stage.W, strict=True)]
    total = sum(work) or 1.0
    return [each / total for each in work]


def _differ(old: float, new: float) -> bool:
    return abs(new - old) > _DRIFT * max(old, new)
