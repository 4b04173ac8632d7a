"""What every stage of a placement costs, as numbers that simulations and searches take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sternway.schedule._action import Step
from sternway.schedule._again import Share


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs for one placement: one number for each stage.

    ``comm[a][b]`` is the time of a message from rank a to rank b, none from a rank to itself, and ``comm_busy`` the
    share of it in which no other can set out there. ``keeps[s]`` is what F of stage s adds to its rank's memory,
    ``keeps_after_i[s]`` what I leaves of it, and ``works[s]`` what I or B takes beyond ``keeps[s]`` while it runs:
    something if the stage is recomputed. ``away[s]`` is what a microbatch keeps on its rank while it is offloaded.
    """

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 - the paper's letter
    W: tuple[float, ...]
    B: tuple[float, ...]
    comm: tuple[tuple[float, ...], ...]
    keeps: tuple[float, ...]
    keeps_after_i: tuple[float, ...]
    works: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    gathered: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()
    away: tuple[float, ...] = ()
    overlap: tuple[float, ...] = ()
    selective: tuple[float, ...] = ()
    comm_busy: float = 0.0

    @property
    def amounts(self) -> tuple[tuple[float, ...], ...]:
        """All amounts of memory, in the order in which ``kept_by`` takes them."""
        return self.keeps, self.keeps_after_i, self.gathered, self.works, self.away

    def time(self, step: Step) -> float:
        """Return how long a rank computes at a step."""
        if len(step.actions) == 1:
            return self.of(step.actions[0].op, step.actions[0].stage)
        return self.pace(step) * sum(self.of(action.op, action.stage) for action in step.actions)

    def pace(self, step: Step) -> float:
        """Return what the times of a step's actions are multiplied by: 1, unless they are overlapped."""
        return self.overlap[step.actions[0].stage] if len(step.actions) > 1 else 1.0

    def of(self, op: str, stage: int) -> float:
        """Return the time that ``op`` of ``stage`` takes."""
        times: tuple[float, ...] = getattr(self, op)
        return times[stage]

    def longer(self, stage: int, share: Share) -> float:
        """Return how much longer I and B of a stage take if such a share of it is recomputed."""
        return share.whole * self.F[stage] + share.selective * self.selective[stage]

    def recomputed(
        self, much: Mapping[int, Share], inputs: Sequence[float], again: Sequence[float], cheap: Sequence[float]
    ) -> StageCosts:
        """Return costs in which such shares of stages are recomputed in I and B.

        A stage then keeps its input, or ``cheap`` if it is recomputed selectively.
        """
        i, b, keeps, works = list(self.I), list(self.B), list(self.keeps), list(self.works)
        for stage, share in much.items():
            kept, small, most = self.keeps[stage], inputs[stage], again[stage]
            i[stage] += self.longer(stage, share)
            b[stage] += self.longer(stage, share)
            less = share.whole * (kept - small) + share.selective * (kept - cheap[stage])
            keeps[stage] = small if share.whole == 1 else kept - less
            # What comes back is no more than was not kept; one block at a time, and it may be less.
            works[stage] = min(max(0.0, most - small), max(0.0, less) + max(0.0, most - kept))
        return replace(self, I=tuple(i), B=tuple(b), keeps=tuple(keeps), works=tuple(works))

    def joined(self) -> StageCosts:
        """Return costs in which I and W together take no longer than B, and no action longer than if overlapped.

        An overlapped pair takes as long as its two actions one after the other then do, or longer.
        """
        apart: tuple[list[float], list[float]] = [], []
        for i, w, b in zip(self.I, self.W, self.B, strict=True):
            gains = b < i + w
            apart[0].append(min(i, b) if gains else i)
            apart[1].append(b - apart[0][-1] if gains else w)
        least = min(1.0, *self.overlap)
        times = [tuple(least * time for time in each) for each in (self.F, *apart, self.B)]
        return replace(self, F=times[0], I=times[1], W=times[2], B=times[3])
