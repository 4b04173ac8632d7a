"""One number of ranks: every named schedule and "auto", planned and measured, in rounds."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from asleep import AsleepBlock
from models import gpt

from sternway import pipeline, schedule
from sternway._torch.memory import OperationCounter
from sternway.errors import ScheduleError
from sternway.pipeline import Pipeline, Way
from sternway.schedule import Schedule, Timeline, measured_costs

WARM_UP = 2
MOVED, SHARE = ("gpipe", "1f1b", "interleaved-1f1b"), 0.75  # which run within this share of their bytes, by offload


@dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    ranks: int
    device: str
    dim: int
    rounds: int
    steps: int  # in one timing of a named schedule
    all_steps: int  # of "auto", from its first one on
    only: tuple[str, ...] = ()  # these schedules
    times: bool = True  # or bytes alone
    asleep: float = 0.0  # seconds of an F, an I and a W of a rank, if blocks sleep instead of computing
    spread: float = 0.0  # how much these differ: the standard deviation, as a share of the mean
    shares: tuple[float, ...] = ()  # of 1F1B's bytes, that runs must keep within

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks

    @property
    def rows(self) -> int:
        return 4 if self.device == "cuda" else 2

    @property
    def length(self) -> int:
        return 512 if self.device == "cuda" else 64

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def model(self) -> nn.Module:
        """Two blocks for each rank, so that schedules with two stages on each can run."""
        torch.manual_seed(0)
        if self.asleep:
            half = self.asleep / 2
            spread = self.spread * 2**0.5  # of one of two blocks
            return nn.Sequential(*(AsleepBlock(self.dim, half, half, half, spread) for _ in range(2 * self.ranks)))
        with torch.device(self.device):
            return gpt(self.dim, 2 * self.ranks, heads=max(4, self.dim // 128)).to(self.dtype)

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        shape = rows or self.microbatches * self.rows, self.length, self.dim
        x, target = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return x, target

    def names(self) -> list[str]:
        """The named schedules that exist for so many ranks."""
        found = []
        for name in self.only or schedule.names():
            try:
                plan = schedule.make(name, ranks=self.ranks, microbatches=self.microbatches)
            except ScheduleError:
                continue
            found += [name] if plan.num_stages <= 2 * self.ranks else []
        return found


@dataclass
class Row:
    """What was measured of one schedule, one number for each round. Times are seconds of a step."""

    step: list[float] = field(default_factory=list)  # for "auto": by the plan that it has kept
    planned: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)  # of "auto" alone: with its tries
    action: list[float] = field(default_factory=list)  # the median action
    story: list[str] = field(default_factory=list)  # what "auto" tried
    peaks: list[dict[str, int]] = field(default_factory=list)  # of each rank: predicted and measured bytes


class Bench:
    """Runs the rows of a case on one rank."""

    def __init__(self, rank: int, case: Case) -> None:
        self._rank, self._case = rank, case
        self._together = dist.new_group(backend="gloo")
        self._x, self._target = case.batch()
        self._moving: dict[str, Schedule] = {}  # schedules that offload microbatches

    def run(self) -> dict[str, Row]:
        predicted = self._predicted()
        more = ["auto"] if self._case.times else list(self._moving)
        rows = {name: Row() for name in [*self._case.names(), *more]}
        for number in range(self._case.rounds if self._case.times else 1):
            for name, row in rows.items():
                with self._pipeline(name) as pipe:
                    if self._case.times:
                        self._time(pipe, name, row)
                    if number == 0 and name in predicted:
                        self._weigh(pipe, predicted[name], row)
                if self._rank == 0 and self._case.times:
                    times = f"{1e3 * row.step[-1]:.1f} ms, planned {1e3 * row.planned[-1]:.1f}"
                    sys.stderr.write(f"{self._case.ranks} ranks, {name}: {times}\n")
        return rows

    @contextmanager
    def _pipeline(self, name: str) -> Iterator[Pipeline]:
        case, (x, target) = self._case, self._case.batch(self._case.rows)
        known = {} if name != "auto" else {"sample": x, "sample_target": target}
        with tempfile.TemporaryDirectory() as folder:
            known |= {"offload_to": folder} if name in self._moving else {}
            pipe = Pipeline(
                case.model(),
                schedule=self._moving.get(name, name),
                n_microbatches=case.microbatches,
                loss_fn=F.mse_loss,
                **known,
            )
            with closing(pipe):
                yield from self._warm(pipe)

    def _warm(self, pipe: Pipeline) -> Iterator[Pipeline]:
        for _ in range(WARM_UP):
            pipe.step(self._x, target=self._target)
        gc.collect()
        gc.disable()
        yield pipe
        gc.enable()

    def _time(self, pipe: Pipeline, name: str, row: Row) -> None:
        if name == "auto":
            row.whole.append(self._timed(pipe, self._case.all_steps)[0])
            row.story.append("; ".join(map(str, pipe.plans)))
            pipe.stop_tuning()
        seconds, measured = self._timed(pipe, self._case.steps)
        row.step.append(seconds)
        looks = [each() for each in measured[::2]]
        row.planned.append(pipe.schedule.simulate(measured_costs(looks, pipe.costs)).period)
        row.action.append(_median_action(looks))

    def _timed(self, pipe: Pipeline, steps: int) -> tuple[float, list[Callable[[], Timeline]]]:
        """The seconds of a step among others, and what waits for the times in each."""
        measured: list[Callable[[], Timeline] | None] = []
        seconds = step_seconds(pipe, self._x, self._target, steps, measured)
        return seconds, [each for each in measured if each is not None]

    # Memory

    def _predicted(self) -> dict[str, list[int]]:
        """What each rank will hold in a step beyond its parameters and their gradients, by schedule."""
        case, (x, target) = self._case, self._case.batch(self._case.rows)
        if case.asleep:
            return {}
        told: list[Any] = [None]
        if self._rank == 0:

            def fit(**options: Any) -> tuple[Way, ...]:
                ranks, microbatches, loss_fn = case.ranks, case.microbatches, F.mse_loss
                model, counts = case.model(), {"ranks": ranks, "n_microbatches": microbatches}
                return pipeline.fit(
                    model, x, **counts, loss_fn=loss_fn, target=target, optimizer="none", **options
                ).ways

            ways = [way for way in fit() if not way.recompute]
            least = {way.schedule.name: way.peak for way in ways}
            for name in MOVED if case.device == "cpu" and not case.times else ():
                smaller = fit(schedule=name, memory=int(SHARE * least[name]))
                ways += [way for way in smaller if way.moved and not way.recompute]
            told = [ways]
        dist.broadcast_object_list(told, group=self._together)
        found: list[Way] = told[0]
        self._moving = {way.schedule.name: way.schedule for way in found if way.moved}
        return {way.schedule.name: [each.activations + each.working for each in way.ranks] for way in found}

    def _weigh(self, pipe: Pipeline, predicted: list[int], row: Row) -> None:
        mine = torch.tensor([self._held(pipe)])
        everyone = [torch.zeros_like(mine) for _ in range(self._case.ranks)]
        dist.all_gather(everyone, mine, group=self._together)
        row.peaks = [{"predicted": one, "measured": int(other)} for one, other in zip(predicted, everyone, strict=True)]

    def _held(self, pipe: Pipeline) -> int:
        def step() -> None:
            pipe.step(self._x, target=self._target, record=False)

        if self._case.device == "cuda":
            step()
            torch.cuda.synchronize()
            dist.barrier(self._together)  # of earlier steps, nothing is on its way
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        with OperationCounter() as counter:
            step()  # now it knows what was there before
            before = counter.peak = counter.now
            step()
        return counter.peak - before


def step_seconds(
    pipe: Pipeline, x: Tensor, target: Tensor, steps: int, measured: list[Callable[[], Timeline] | None] | None = None
) -> float:
    """The seconds of a step among others; what waits for the times in each is added to ``measured``.

    By each rank's own clock from the end of a step to that of the last: ranks begin and end one after the other, which
    is no time lost. The longest of all ranks counts.
    """

    def now() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    pipe.step(x, target=target)
    start = now()
    for _ in range(steps):
        found = pipe.step(x, target=target).measured
        if measured is not None:
            measured.append(found)
    return max(pipe.transport.crew().share((now() - start) / steps))


def _median_action(timelines: list[Timeline]) -> float:
    events = (event for timeline in timelines for rank in timeline.events for event in rank)
    return statistics.median(event.end - event.start for event in events)


def measure(rank: int, case: Case, path: str) -> None:
    """Run a case on this rank; the first one writes what was found to a file."""
    rows = Bench(rank, case).run()
    if rank == 0:
        Path(path).write_text(json.dumps(summary(case, rows)))


def summary(case: Case, rows: dict[str, Row]) -> dict[str, Any]:
    """Ratios within each round, and their medians."""
    found: dict[str, Any] = {"ranks": case.ranks, "device": case.device, "dim": case.dim}
    found["peak_bytes"] = {name: row.peaks for name, row in rows.items() if row.peaks}
    found["predicted_over_measured"] = {
        name: [each["predicted"] / each["measured"] for each in peaks] for name, peaks in found["peak_bytes"].items()
    }
    if not case.times:
        return found
    auto, named = rows["auto"], {name: row for name, row in rows.items() if name != "auto"}
    return found | {
        "step_ms": {name: 1e3 * statistics.median(row.step) for name, row in rows.items()},
        "action_ms": {name: 1e3 * statistics.median(row.action) for name, row in rows.items()},
        "planned_over_measured": {name: _ratio(row.planned, row.step) for name, row in rows.items()},
        "auto_over": {name: _ratio(auto.step, row.step) for name, row in named.items()},
        "auto_with_tries_over": {name: _ratio(auto.whole, row.step) for name, row in named.items()},
        "story": auto.story,
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
