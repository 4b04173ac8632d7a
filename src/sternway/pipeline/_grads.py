"""Gradients that belong to more than one rank: tied parameters, data parallel copies, the norm over all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline._transport import Transport

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter under several names, on one rank or several."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]  # that hold one of the names
    here: tuple[nn.Parameter, ...]  # this process's
    counted_here: bool  # whether this process counts it in norms


def all_ties(tied: Sequence[Sequence[str]], model: Any) -> list[Sequence[str]]:
    """The ties asked for, and those that a whole model has in itself."""
    rule, fix = "tied is a list of groups of parameter names", 'write [("tokens.weight", "head.weight")]'
    PipelineError.unless(isinstance(tied, Sequence) and not isinstance(tied, str | bytes), rule, tied, fix)
    for group in tied:
        fits = isinstance(group, Sequence) and not isinstance(group, str | bytes)
        PipelineError.unless(fits and all(isinstance(name, str) for name in group), rule, group, fix)
    groups: dict[int, list[str]] = {}
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
    return [*tied, *(names for names in groups.values() if len(names) > 1)]


def resolve_ties(
    groups: Sequence[Sequence[str]], named: dict[int, dict[str, nn.Parameter]], transport: Transport
) -> list[Tie]:
    """Find who holds each name, and give all copies the first holder's values.

    Args:
        groups: names that are one parameter.
        named: parameters by rank (of this process) and name.
    """
    ties = []
    for group in groups:
        rows = transport.gather([[float(name in named[rank]) for name in group] for rank in sorted(named)])
        missing = [name for place, name in enumerate(group) if not any(row[place] for row in rows)]
        if missing:
            raise PipelineError(
                "tied names are parameters of some stage", got=repr(missing[0]), fix="check its spelling"
            )
        ranks = tuple(rank for rank, row in enumerate(rows) if any(row))
        here = tuple(
            {id(p): p for rank in named for name in group if (p := named[rank].get(name)) is not None}.values()
        )
        if here:
            first = here[0]
            with torch.no_grad():
                if len(ranks) > 1:
                    transport.copy_from(first.data, ranks[0], ranks)
                for other in here[1:]:
                    other.copy_(first)
        ties.append(Tie(tuple(group), ranks, here, ranks[0] in named))
    return ties


def add_ties(ties: Sequence[Tie], transport: Transport) -> None:
    """Give every copy of a tied parameter the sum of their gradients."""
    for tie in ties:
        if not tie.here:
            continue
        total = torch.zeros_like(tie.here[0])
        for parameter in tie.here:
            if parameter.grad is not None:
                total += parameter.grad
        if len(tie.ranks) > 1:
            transport.add([total], tie.ranks)
        for parameter in tie.here:
            parameter.grad = total.clone()


class DataParallel:
    """Averages gradients over copies of the pipeline, in buckets, each as soon as its stage's last W is done."""

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self._running: list[tuple[Any, Tensor, list[Tensor]]] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin to average these parameters' gradients."""
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # another copy may have one
            if parameter.grad is not None:
                full = sum(grad.nbytes for grad in bucket) + parameter.grad.nbytes > BUCKET_BYTES
                if bucket and (full or bucket[0].dtype != parameter.grad.dtype):
                    self._reduce(bucket)
                    bucket = []
                bucket.append(parameter.grad)
        if bucket:
            self._reduce(bucket)

    def _reduce(self, grads: list[Tensor]) -> None:
        flat = torch.cat([grad.flatten() for grad in grads])
        self._running.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, grads))

    def finish(self) -> None:
        """Wait for the averages and put them into ``.grad``."""
        for work, flat, grads in self._running:
            work.wait()
            flat /= self.size
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self._running.clear()


def square_norm(parameters: Sequence[nn.Parameter], ties: Sequence[Tie]) -> Tensor:
    """The squared norm of this process's gradients; a tied parameter counts once, whoever holds it."""
    skip = {id(p) for tie in ties for place, p in enumerate(tie.here) if place or not tie.counted_here}
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else "cpu")
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in skip:
            square += parameter.grad.double().square().sum()
    return square


def float_of(number: Real) -> float:
    """As a float; infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_norm(max_norm: Any) -> None:
    """What a norm is held to is a positive number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not 0 < float_of(max_norm) < math.inf:
        raise PipelineError("the largest norm is positive", got=repr(max_norm), fix="pass a number such as 1.0")


def clip_norm(
    parameters: Sequence[nn.Parameter], ties: Sequence[Tie], max_norm: float, add: Callable[[Tensor], None]
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``; the norm before."""
    check_norm(max_norm)
    square = square_norm(parameters, ties)
    add(square)
    norm = square.sqrt().float()
    scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale)
    return norm
