"""What each piece of a model costs: F, I, W and B in seconds, and the bytes it keeps after F and after I."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline._partition import called_modules, split_model
from sternway.pipeline._payload import pack
from sternway.pipeline._stage import MAIN, LossFn, Microbatch, Payload, Stage
from sternway.schedule import Costs

_GAIN = 0.97
"""How far below I + W a whole backward must be, to count."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs, one entry for each stage.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> found = profile(model, torch.randn(4, 8), repeats=1)
        >>> len(found.F), found.names
        (3, ('0', '1', '2'))
    """

    names: tuple[str, ...]
    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 - the paper's letter
    W: tuple[float, ...]
    B: tuple[float, ...]
    """A backward in one piece."""
    bytes_after_F: tuple[int, ...]  # noqa: N815
    bytes_after_I: tuple[int, ...]  # noqa: N815
    sent_bytes: tuple[int, ...]
    """What each stage sends on for one microbatch."""
    comm: float = 0.0
    """Seconds that a message takes; ``profile`` knows one process only, and a ``Pipeline`` measures it."""

    @property
    def costs(self) -> Costs:
        """As ``schedule.search`` and ``simulate`` take them, one number for each stage.

        B is left out where it gains too little over I and W to be told from noise.
        """
        kept = sum(self.bytes_after_F)
        gains = sum(self.B) < _GAIN * (sum(self.I) + sum(self.W))
        return Costs(
            F=self.F,
            I=self.I,
            W=self.W,
            B=self.B if gains else None,
            comm=self.comm,
            memory_after_I=min(1.0, sum(self.bytes_after_I) / kept) if kept else 1.0,
        )

    def grouped(self, starts: Sequence[int]) -> Profile:
        """The same work in fewer stages, each beginning at one of ``starts``."""
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
        model: stages in order, or a model, which is taken apart as ``partition`` would.
        sample: one microbatch for the first stage: a tensor, or a tuple of arguments.
        loss_fn: with ``target``, the loss that the last stage ends in; the output's sum, unless given.
        target: what the loss compares with.
        repeats: how often each is timed; the median counts.
    """
    PipelineError.unless(
        type(repeats) is int and 1 <= repeats <= 10**6, "repeats is a number from 1 on", repeats, "pass 5"
    )
    names, modules = _taken_apart(model)
    last = len(modules) - 1
    stages = [
        Stage(i, module, is_last=i == last, loss_fn=(loss_fn or _total) if i == last else None)
        for i, module in enumerate(modules)
    ]
    arguments = sample if type(sample) is tuple else (sample,)
    microbatch = Microbatch(arguments=arguments, target=target if target is not None else 0)
    rows: list[list[tuple[float, ...]]] = [[] for _ in stages]
    kept: list[tuple[int, int]] = [(0, 0)] * len(stages)
    sent = [0] * len(stages)
    with _own_gradients(modules):
        for number in range(repeats + 1):
            try:
                _once(stages, microbatch, rows, kept, sent, weigh=number == 0)  # the first one warms up, too
            except PipelineError:
                raise
            except Exception as error:
                raise PipelineError(
                    "the sample goes through the model, forward and back",
                    got=f"{type(error).__name__}: {error}",
                    fix="pass one microbatch, as a tensor or a tuple of arguments",
                ) from error
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
def _own_gradients(modules: list[nn.Module]) -> Iterator[None]:
    """Put the parameters' gradients aside, and back."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    aside = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, aside, strict=True):
            parameter.grad = grad


def _taken_apart(model: nn.Module | Sequence[nn.Module]) -> tuple[list[str], list[nn.Module]]:
    """The stages to profile, and their names."""
    if isinstance(model, nn.Module):
        names = called_modules(model)
        if not names:
            raise PipelineError(
                "a model that is profiled calls modules", got=type(model).__name__, fix="pass its stages"
            )
        return names, split_model(model, names[1:])
    PipelineError.unless(
        isinstance(model, Sequence) and len(model) > 0 and all(isinstance(stage, nn.Module) for stage in model),
        "a model or a list of stages is profiled",
        model,
        "pass one",
    )
    return [str(index) for index in range(len(model))], list(model)


def _total(output: Any, target: Any) -> Tensor:
    """A stand-in for a loss: the sum of everything that needs a gradient."""
    _, tensors = pack(output)
    return torch.stack([tensor.sum() for tensor in tensors if tensor.requires_grad]).sum()


def _once(
    stages: list[Stage],
    microbatch: Microbatch,
    rows: list[list[tuple[float, ...]]],
    kept: list[tuple[int, int]],
    sent: list[int],
    weigh: bool,
) -> None:
    """One microbatch forward through every stage and back, twice: with I and W, and with B.

    What autograd keeps is weighed if asked. Weighing goes through hooks on saved tensors, which the split would see:
    not in a run whose W counts.
    """
    forward = _forward(stages, microbatch, kept, sent, weigh)
    grads: dict[str, list[Tensor]] = {}
    halves: dict[int, tuple[float, float]] = {}
    for stage in reversed(stages):
        start = _now()
        found = stage.backward_input(0, grads)
        middle = _now()
        pending = stage._pendings.get(0)
        kept[stage.index] = (kept[stage.index][0], pending.nbytes if pending is not None else 0)
        again = _now()
        stage.backward_weight(0)
        halves[stage.index] = middle - start, _now() - again
        grads = {MAIN: found[MAIN]} if MAIN in found else {}
        stage.clear()

    _forward(stages, microbatch, kept, sent, weigh=False)
    grads = {}
    for stage in reversed(stages):
        start = _now()
        found = stage.backward(0, grads)
        rows[stage.index].append((forward[stage.index], *halves[stage.index], _now() - start))
        grads = {MAIN: found[MAIN]} if MAIN in found else {}
        stage.clear()


def _forward(
    stages: list[Stage], microbatch: Microbatch, kept: list[tuple[int, int]], sent: list[int], weigh: bool
) -> list[float]:
    """How long F of each stage takes; what it sends, and keeps if it is to be weighed, go into the lists."""
    received: dict[str, Payload] = {}
    times: list[float] = []
    for stage in stages:
        saved = _SavedBytes()
        with saved if weigh else nullcontext():
            start = _now()
            received = stage.forward(0, microbatch, received, keep_output=False)
            times.append(_now() - start)
        if weigh:
            kept[stage.index] = (saved.total(stage.module), 0)
        sent[stage.index] = sum(t.nbytes for _, tensors in received.values() for t in tensors)
    return times


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """What autograd keeps of a forward, each storage once, parameters apart."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

        def pack_hook(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack_hook, lambda tensor: tensor)

    def total(self, module: nn.Module) -> int:
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        return sum(size for key, size in self.sizes.items() if key not in own)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
