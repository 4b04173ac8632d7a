"""Will it fit? The memory of each rank, before anything is launched: no GPU, no weights, no data.

The model runs once on tensors without memory, which know their shapes alone (``_weigh.py``). A rank holds its
parameters, their gradients, the optimizer's state, and what the schedule's order of actions keeps of activations; the
most is reached while some action runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sternway import schedule as schedules
from sternway._bytes import parse_bytes, show_bytes
from sternway._torch import require
from sternway._torch.memory import without_memory
from sternway._tree import replace_leaves
from sternway.errors import PipelineError, ScheduleError, SternwayError
from sternway.pipeline.build._partition import arguments_of
from sternway.pipeline.build._rank_bytes import KINDS, OPTIMIZERS, Shards
from sternway.pipeline.build._request import check_copies
from sternway.pipeline.build._shadow import blank, shadow
from sternway.pipeline.build._ways import Way, WaysToTrain
from sternway.pipeline.build._weigh import SHOWN, LargeTensor
from sternway.pipeline.forward._record import sample_runs
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn
from sternway.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Fit:
    """What ``fit`` found.

    Attributes:
        ways: the ways to train, the fastest first.
        limit: the bytes that a rank has; None if no limit was given.
        parameters: how many numbers the model's parameters hold.
        largest: its largest parameters.
        changes: what twice as many ranks, and half as many rows in a microbatch, would make of the way that is shown;
            nothing unless that was asked for.
    """

    ways: tuple[Way, ...]
    limit: int | None
    parameters: int
    largest: tuple[LargeTensor, ...] = ()
    changes: Mapping[str, Way] = field(default_factory=dict)

    @property
    def shown(self) -> Way:
        """The fastest way that fits; if none does, the smallest."""
        return self.best or min(self.ways, key=lambda way: way.peak)

    @property
    def best(self) -> Way | None:
        """The fastest way that fits; None if none does. One that offloads counts only if no other fits."""
        return min((way for way in self.ways if self.fits(way)), key=lambda way: way.moved > 0, default=None)

    def fits(self, way: Way) -> bool:
        """Whether no rank needs more than there is."""
        return self.limit is None or way.peak <= self.limit

    @property
    def verdict(self) -> str:
        """One sentence: the fastest way that fits, or what the smallest one lacks."""
        best = self.best
        if best is not None:
            of = "" if self.limit is None else f" of {show_bytes(self.limit)}"
            return f"It fits: {best} needs {show_bytes(best.peak)}{of} on the fullest rank." + self._faster(best)
        smallest = self.shown
        rank = max(smallest.ranks, key=lambda rank: rank.total)
        kinds = {name: getattr(rank, name) for name in KINDS}
        largest = max(kinds, key=lambda name: kinds[name])
        return (
            f"It does not fit: the smallest way, {smallest}, needs {show_bytes(smallest.peak)} of "
            f"{show_bytes(self.limit or 0)}, most of it for {largest} ({show_bytes(kinds[largest])}). "
            + ("Use smaller microbatches." if largest in ("activations", "working") else "Use more ranks or shards.")
        )

    def _faster(self, best: Way) -> str:
        """What offloading would change, if that is faster."""
        way = next((way for way in self.ways if way.moved and self.fits(way) and way.time < best.time), None)
        if way is None or best.moved:
            return ""
        return f" With offload, {way} takes {way.time / best.time:.0%} of its time, if the link keeps up."

    def __repr__(self) -> str:
        rows = [("schedule", "fullest rank", "time", "")]
        rows += [
            (str(way), show_bytes(way.peak), f"{way.time:.2f}", "" if self.fits(way) else "too large")
            for way in self.ways
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.verdict, *(f"  {line}" for line in lines)])


def fit(
    model: nn.Module | Callable[[], Any],
    sample: Any = None,
    *,
    ranks: int,
    n_microbatches: int,
    memory: int | str | None = None,
    schedule: str | None = None,
    loss_fn: LossFn | None = None,
    target: Any = None,
    optimizer: str = "adamw",
    shards: int = 1,
    gathered: int | None = None,
    what_if: bool = False,
    device: str | None = None,
) -> Fit:
    """Say how much memory each rank of a pipeline will need, without any of it.

    Not counted: what CUDA and NCCL take for themselves, gaps between blocks of memory, and what a kernel or the
    optimizer's step takes for a moment.

    Args:
        model: the model, which may be on the meta device; or a function that returns it, or it and a sample. The
            function is called under ``torch.device("meta")``, so that no weights are made.
        sample: one microbatch: a tensor, a tuple of arguments, or a dict of keyword arguments. Its values do not
            matter.
        ranks: the number of ranks.
        n_microbatches: how many microbatches a step has.
        memory: what each rank has: bytes, or text such as "80GB". Schedules that need more are also counted with as few
            blocks recomputed, and with as many microbatches offloaded, as make them fit.
        schedule: the name of a schedule; all are tried by default.
        loss_fn: the loss at the end; by default the model's own, or the sum of its output.
        target: the target of the loss.
        optimizer: "adamw", "adam", "momentum", "sgd" or "none": how much it keeps for each parameter.
        shards: over how many processes ``fully_shard`` shards the modules of each stage, all of them. They are counted
            as gathered and reduced in the dtype of the parameters.
        gathered: how many stages a rank keeps gathered at once, as for ``Pipeline``.
        what_if: whether to count also with twice as many ranks, and with half as many rows in a microbatch.
        device: where the ranks will be, "cuda" or "cpu", whose messages are held for longer; by default on CPUs if the
            model is there, and on GPUs if it has no weights.

    Raises:
        PipelineError: if the sample does not go through the model, or the model cannot be cut into so many stages.
    """
    require("pipeline.fit")
    limit = None if memory is None else parse_bytes(memory, "memory", PipelineError)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise PipelineError(
            "optimizer must be one that is known", got=repr(optimizer), fix=f"pass one of {[*OPTIMIZERS]}"
        )
    for name, count in (("shards", shards), ("gathered", 1 if gathered is None else gathered)):
        PipelineError.unless(
            type(count) is int and count >= 1, f"{name} must be a number from 1 on", count, "pass 1 or more"
        )
    PipelineError.unless(device in (None, "cpu", "cuda"), "device must be known", device, 'pass "cuda" or "cpu"')
    names = schedules.names() if schedule is None else (schedule,)
    check_copies(names[0])
    plans = list(_plans(names, ranks, n_microbatches))
    if not plans:
        raise PipelineError(
            "some schedule must be possible",
            got=f"{ranks} ranks, {n_microbatches} microbatches",
            fix="use more of both",
        )
    if not isinstance(model, nn.Module):
        model, sample = _called(model, sample)
    gpus = device != "cpu" if device else any(each.device.type != "cpu" for each in model.parameters())
    with without_memory():
        made = shadow(model)
        arguments, keywords = arguments_of(replace_leaves(blank, sample))
        microbatch = Microbatch(arguments, keywords, target=0 if target is None else replace_leaves(blank, target))
        with sample_runs():
            kept, sharding = OPTIMIZERS[optimizer], Shards(shards, gathered)
            problem = WaysToTrain(made, microbatch, loss_fn, kept, sharding, limit, gpus)
            ways = list(problem.ways(plans))
            found = Fit(tuple(sorted(ways, key=lambda way: way.time)), limit, 0)
            changes = problem.changes(found.shown, n_microbatches) if what_if and ways else {}
        numbers = sum(parameter.numel() for parameter in made.parameters())
        named = sorted(made.named_parameters(), key=lambda each: -each[1].nbytes)
        largest = tuple(LargeTensor.of(*each) for each in named[:SHOWN])
    if not ways:
        raise PipelineError(
            f"the model must have at least {ranks} pieces that can be cut apart",
            got=f"{len(problem.layout.points)}",
            fix="use fewer ranks",
        )
    return Fit(tuple(sorted(ways, key=lambda way: way.time)), limit, numbers, largest, changes)


def _plans(names: Sequence[str], ranks: int, microbatches: int) -> Iterator[Schedule]:
    for name in names:
        try:
            yield schedules.make(name, ranks=ranks, microbatches=microbatches)
        except ScheduleError:
            if len(names) == 1:
                raise


def _called(build: Callable[[], Any], sample: Any) -> tuple[nn.Module, Any]:
    """The model that a function makes, and the sample, if it makes that, too."""
    PipelineError.unless(callable(build), "model must be an nn.Module, or a function that makes one", build, "pass one")
    try:
        with torch.device("meta"):
            made = build()
    except SternwayError:
        raise
    except Exception as error:
        raise PipelineError(
            'the function must run under torch.device("meta")',
            got=f"{type(error).__name__}: {error}",
            fix="make a model and a sample there, and read no values",
        ) from error
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    if len(rest) == 1 and sample is None:
        sample = rest.pop()
    if not isinstance(model, nn.Module) or rest or sample is None:
        raise PipelineError(
            "the function must return a model and a sample",
            got=f"{type(made).__name__}{', and no sample' if isinstance(made, nn.Module) else ''}",
            fix="return model, sample",
        )
    return model, sample
