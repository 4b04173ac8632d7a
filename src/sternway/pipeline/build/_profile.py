"""Measuring the cost of each part of a model: F, I, W and B in seconds, and the bytes kept after F and after I."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sternway._bytes import show_bytes
from sternway._storage import storage_sizes
from sternway._torch import require
from sternway._torch.hooks import without_hooks
from sternway.errors import PipelineError
from sternway.pipeline.build._partition import arguments_of, lay_out
from sternway.pipeline.build._sample_loss import sample_loss
from sternway.pipeline.forward._part import with_models
from sternway.pipeline.forward._record import sample_runs
from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn, Stage
from sternway.pipeline.transport._payload import Payload, pack
from sternway.pipeline.transport._routes import MAIN
from sternway.schedule import Costs

_GAIN = 0.97
"""B counts only if it takes at most this share of I + W. A smaller gain cannot be told from noise."""


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """Measured costs of one microbatch, one entry for each stage.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> found = profile(model, torch.randn(4, 8), repeats=1)
        >>> len(found.F), found.names
        (2, ('0', '2'))

    Attributes:
        names: the stages, by the modules that they begin with.
        F: seconds of the forward.
        I: seconds of the backward for the inputs.
        W: seconds of the backward for the weights.
        B: seconds of a backward in one piece.
        bytes_after_F: bytes that autograd keeps after F.
        bytes_after_I: bytes that are still kept after I, for W.
        sent_bytes: bytes that the stage sends to the next.
        comm: seconds that a message takes. A ``Pipeline`` measures it; ``profile``, in one process, cannot.
        comm_busy: the share of that in which no other message can set out: the time of its bytes. Likewise.
        selective: seconds that F and B take longer if blocks are recomputed selectively. A ``Pipeline`` measures that
            if its memory is limited.
    """

    names: tuple[str, ...]
    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 - the paper's letter
    W: tuple[float, ...]
    B: tuple[float, ...]
    bytes_after_F: tuple[int, ...]  # noqa: N815
    bytes_after_I: tuple[int, ...]  # noqa: N815
    sent_bytes: tuple[int, ...]
    comm: float = 0.0
    comm_busy: float = 0.0
    selective: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        rows = [("stage", "F ms", "I ms", "W ms", "B ms", "kept after F", "after I", "sent")]
        columns = (self.F, self.I, self.W, self.B, self.bytes_after_F, self.bytes_after_I, self.sent_bytes)
        totals = tuple(sum(column) for column in columns[:-1])
        for name, *values in [*zip(self.names, *columns, strict=True), ("total", *totals)]:
            times, sizes = [f"{1e3 * value:.3f}" for value in values[:4]], map(show_bytes, values[4:])
            rows.append((name, *times, *sizes))
        widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            )
            for row in rows
        ]
        return "\n".join([f"Profile of {len(self.names)} stages, one microbatch", *("  " + line for line in lines)])

    @property
    def costs(self) -> Costs:
        """The costs for ``schedule.search`` and ``simulate``, one number for each stage.

        B is left out if it gains too little over I and W to be told from noise.
        """
        kept = sum(self.bytes_after_F)
        gains = sum(self.B) < _GAIN * (sum(self.I) + sum(self.W))
        return Costs(
            F=self.F,
            I=self.I,
            W=self.W,
            B=self.B if gains else None,
            comm=self.comm,
            comm_busy=self.comm_busy,
            memory_after_I=sum(self.bytes_after_I) / kept if kept else 1.0,
            selective=self.selective,
        )

    @property
    def totals(self) -> list[float]:
        """F, I and W of each stage together."""
        return [f + i + w for f, i, w in zip(self.F, self.I, self.W, strict=True)]

    def grouped(self, starts: Sequence[int]) -> Profile:
        """The same work in fewer stages, which begin at ``starts``."""
        ends = [*starts[1:], len(self.F)]
        spans = list(zip(starts, ends, strict=True))

        def total(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(sum(values[start:end]) for start, end in spans)

        return Profile(
            names=tuple(self.names[start] for start in starts),
            F=total(self.F),
            I=total(self.I),
            W=total(self.W),
            B=total(self.B),
            bytes_after_F=total(self.bytes_after_F),
            bytes_after_I=total(self.bytes_after_I),
            sent_bytes=tuple(self.sent_bytes[end - 1] for end in ends),
            comm=self.comm,
            comm_busy=self.comm_busy,
            selective=None if self.selective is None else total(self.selective),
        )


def profile(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    repeats: int = 5,
) -> Profile:
    """Time F, I, W and B of each stage, or of each module that a whole model calls, on one microbatch.

    Args:
        model: a list of stages, or a model, which is cut at each module that it calls.
        sample: one microbatch for the first stage: a tensor, a tuple of arguments, or a dict of keyword arguments.
        loss_fn: the loss at the end of the last stage; by default the sum of its output.
        target: the target of the loss.
        repeats: how often each is timed; the median counts.
    """
    PipelineError.unless(
        type(repeats) is int and 1 <= repeats <= 10**6, "repeats must be a number from 1 on", repeats, "pass 5"
    )
    require("pipeline")
    names, modules = _stages(model, sample)
    last = len(modules) - 1
    arguments, keywords = arguments_of(sample)
    microbatch = Microbatch(arguments, keywords, target=target if target is not None else 0)
    rows: list[list[tuple[float, ...]]] = [[] for _ in modules]
    kept: list[tuple[int, int]] = [(0, 0)] * len(modules)
    sent = [0] * len(modules)
    with own_gradients(modules), untouched(*with_models(modules)), sample_loss(loss_fn, modules) as loss:
        stages = [
            Stage(i, module, is_last=i == last, loss_fn=(loss or total_loss) if i == last else None)
            for i, module in enumerate(modules)
        ]
        for number in range(repeats + 1):
            with sample_runs():
                _once(stages, microbatch, rows, kept, sent, weigh=number == 0)  # the first one warms up, too
    f, i, w, b = zip(*(map(statistics.median, zip(*stage[1:], strict=True)) for stage in rows), strict=True)
    return Profile(
        names=tuple(names),
        F=f,
        I=i,
        W=w,
        B=b,
        bytes_after_F=tuple(after_f for after_f, _ in kept),
        bytes_after_I=tuple(after_i for _, after_i in kept),
        sent_bytes=tuple(sent),
    )


@contextmanager
def own_gradients(modules: list[nn.Module]) -> Iterator[None]:
    """A block after which the parameters have the gradients they had before. None of their hooks runs in it.

    A hook may do more than change a gradient: take an optimizer step, count, or talk to other processes.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    aside = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with without_hooks(parameters):
            yield
    finally:
        for parameter, grad in zip(parameters, aside, strict=True):
            parameter.grad = grad


def _stages(model: nn.Module | Sequence[nn.Module], sample: Any) -> tuple[list[str], list[Any]]:
    """The names of the stages to profile, and the stages."""
    if isinstance(model, nn.Module):
        layout = lay_out(model, sample)
        if not layout.calls:
            raise PipelineError(
                "a model to profile must call modules", got=type(model).__name__, fix="pass a list of stages"
            )
        return layout.names, list(layout.cut(model, range(len(layout.names))).parts())
    PipelineError.unless(
        isinstance(model, Sequence) and len(model) > 0 and all(isinstance(stage, nn.Module) for stage in model),
        "model must be an nn.Module, or a list of stages",
        model,
        "pass one of them",
    )
    return [str(index) for index in range(len(model))], list(model)


def total_loss(output: Any, target: Any) -> Tensor:
    """A loss by default: the sum of all outputs that require gradients."""
    _, tensors = pack(output)
    sums = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not sums:
        raise PipelineError(
            "without a loss_fn, some output of the model must require a gradient",
            got=f"{len(tensors)} tensors, none of which does",
            fix="pass loss_fn=, or train some parameters",
        )
    return torch.stack([each.real if each.is_complex() else each for each in sums]).sum()


def _once(
    stages: list[Stage],
    microbatch: Microbatch,
    rows: list[list[tuple[float, ...]]],
    kept: list[tuple[int, int]],
    sent: list[int],
    weigh: bool,
) -> None:
    """One microbatch forward and backward through every stage, twice: with I and W, and with B.

    If ``weigh``, the bytes that autograd keeps are counted. That needs hooks on saved tensors, which change what the
    split does, so the times of such a run do not count.
    """
    devices = _devices(stages)
    forward = _forward(stages, microbatch, kept, sent, weigh)
    grads: dict[str, list[Tensor]] = {}
    halves: dict[int, tuple[float, float]] = {}
    for stage in reversed(stages):
        start = _now(devices)
        found = stage.backward_input(0, grads)
        middle = _now(devices)
        kept[stage.index] = (kept[stage.index][0], stage.pending_bytes(0))
        again = _now(devices)
        stage.backward_weight(0)
        halves[stage.index] = middle - start, _now(devices) - again
        grads = {MAIN: found[MAIN]} if MAIN in found else {}
        stage.clear()

    _forward(stages, microbatch, kept, sent, weigh=False)
    grads = {}
    for stage in reversed(stages):
        start = _now(devices)
        found = stage.backward(0, grads)
        rows[stage.index].append((forward[stage.index], *halves[stage.index], _now(devices) - start))
        grads = {MAIN: found[MAIN]} if MAIN in found else {}
        stage.clear()


def _forward(
    stages: list[Stage], microbatch: Microbatch, kept: list[tuple[int, int]], sent: list[int], weigh: bool
) -> list[float]:
    """Time F of each stage. The bytes that it sends, and those that it keeps, go into the lists."""
    received: dict[str, Payload] = {}
    times: list[float] = []
    devices = _devices(stages)
    for stage in stages:
        sizes: dict[int, int] = {}
        with _saved_sizes(sizes) if weigh else nullcontext():
            start = _now(devices)
            received = stage.forward(0, microbatch, received, keep_output=False)
            # What comes before is no work of this piece: the forward's way to it.
            times.append(_now(devices) - (getattr(stage.module, "sternway_begun", None) or start))
        if weigh:
            own = storage_sizes(stage.module.parameters())
            kept[stage.index] = (sum(size for key, size in sizes.items() if key not in own), 0)
        sent[stage.index] = sum(t.nbytes for _, tensors in received.values() for t in tensors)
    return times


def _saved_sizes(sizes: dict[int, int]) -> torch.autograd.graph.saved_tensors_hooks:
    """A block in which the storages that autograd saves go into ``sizes``, with their bytes."""

    def pack_hook(tensor: Tensor) -> Tensor:
        sizes.update(storage_sizes([tensor]))
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor)


def _devices(stages: list[Stage]) -> set[torch.device]:
    """The GPUs that the stages are on."""
    tensors = (chain(stage.module.parameters(), stage.module.buffers()) for stage in stages)
    return {tensor.device for each in tensors for tensor in each if tensor.is_cuda}


def _now(devices: set[torch.device]) -> float:
    """The time when all that these GPUs were given is done."""
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()
