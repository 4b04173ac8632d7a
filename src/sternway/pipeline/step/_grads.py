"""Gradients that concern more than one process: tied parameters, copies, shards, the norm over all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway._torch.dtensors import local_part
from sternway._torch.tensors import scale_each
from sternway.errors import PipelineError
from sternway.pipeline.step._copies import Copies
from sternway.pipeline.step._stage import Stage, named_parameters
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._transport import Transport


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that has several names, on one rank or several."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]  # those that hold one of the names
    here: tuple[nn.Parameter, ...]  # those of this process
    counted_here: bool  # whether this process counts it in norms


def check_ties(tied: Sequence[Sequence[str]]) -> None:
    """Raise unless these are groups of names."""
    rule, fix = "tied must be a list of groups of parameter names", 'pass [("tokens.weight", "head.weight")]'
    PipelineError.unless(isinstance(tied, Sequence) and not isinstance(tied, str | bytes), rule, tied, fix)
    for group in tied:
        fits = isinstance(group, Sequence) and not isinstance(group, str | bytes)
        PipelineError.unless(fits and all(isinstance(name, str) for name in group), rule, group, fix)


def resolve_ties(
    groups: Sequence[Sequence[str]],
    stages: Mapping[int, Stage],
    placement: Mapping[int, Sequence[int]],
    transport: Transport,
) -> list[Tie]:
    """Find which ranks hold the names of each group, and give all copies the values of the first."""
    named: dict[int, dict[str, list[nn.Parameter]]] = {rank: {} for rank in sorted(placement)}
    for rank, held in named.items():
        for index in placement[rank]:
            for name, parameter in stages[index].module.named_parameters(remove_duplicate=False):
                held.setdefault(name, []).append(parameter)  # sharded stages have one of their own each
    ties = []
    for group in groups:
        sizes = [[1.0 + local_part(held[n][0]).numel() if n in held else 0.0 for n in group] for held in named.values()]
        rows = transport.gather(sizes)
        if len({size for row in rows for size in row if size}) > 1:
            raise PipelineError(
                "tied parameters must have the same shape, and be sharded alike",
                got=f"{', '.join(group)} of different sizes",
                fix="call fully_shard on all of them over the same dimension, or on none",
            )
        missing = [name for place, name in enumerate(group) if not any(row[place] for row in rows)]
        if missing:
            raise PipelineError(
                "tied must name parameters that some stage has", got=repr(missing[0]), fix="check the spelling"
            )
        ranks = tuple(rank for rank, row in enumerate(rows) if any(row))
        here = tuple({id(p): p for held in named.values() for name in group for p in held.get(name, ())}.values())
        if here:
            first = local_part(here[0])
            with torch.no_grad():
                if len(ranks) > 1:
                    transport.copy_from(first.data, ranks[0], ranks)
                for other in here[1:]:
                    local_part(other).copy_(first)
        ties.append(Tie(tuple(group), ranks, here, ranks[0] in named))
    return ties


class Gradients:
    """The gradients of this process's parameters: summed over ties, averaged over copies, measured over all ranks.

    Args:
        stages: of this process.
        ties: their tied parameters.
        transport: carries sums over ranks.
        ranks: of the pipeline.
        copies: averages over copies of parameters, if there are some.
        mesh: of the pipeline, if it has one.
        peers: the processes with the same stages, if these are sharded over them.
        reduce_dtype: of the sums over ties.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        ties: Sequence[Tie],
        transport: Transport,
        ranks: int,
        copies: Copies | None,
        mesh: PipelineMesh | None = None,
        peers: Collective | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._reduce_dtype, self._mesh, self._peers = reduce_dtype, mesh, peers
        self._stages, self._ties, self._transport, self._ranks, self._copies = stages, ties, transport, ranks, copies
        self._tied = {id(p) for tie in ties for p in tie.here}
        self._before: dict[int, Tensor | None] = {}  # gradients of earlier steps, which are summed already

    def begin(self) -> None:
        """A step begins: set aside what tied parameters have, so that only this step's gradients are summed."""
        if self._copies is not None:
            self._copies.begin()
        for tie in self._ties:
            if self._is_summed(tie):
                for parameter in tie.here:
                    self._before[id(parameter)], parameter.grad = parameter.grad, None

    def end(self) -> None:
        """A step is over, or has failed."""
        if self._copies is not None:
            self._copies.end()

    def stage_done(self, stage: Stage) -> None:
        """A stage's last W is done: begin to average its gradients over the copies."""
        sharded = () if stage.shards is None else stage.shards.names  # they are unsharded now, and averaged later
        plain = [p for name, p in stage.module.named_parameters() if name not in sharded]
        for parameter in plain:
            _add_terms(parameter)
        if self._copies is not None:
            self._copies.start(p for p in plain if id(p) not in self._tied)

    def finish(self) -> None:
        """All actions are done: sum the gradients of tied parameters, and finish reducing and averaging."""
        late = self._tied.copy()
        for stage in self._stages.values():
            if stage.shards is not None:
                stage.shards.finish()
                late |= {id(p) for name, p in stage.module.named_parameters() if name in stage.shards.names}
        for tie in self._ties:
            self._sum(tie)
        if self._copies is not None:
            self._copies.start(p for p in self._parameters() if id(p) in late)
            self._copies.finish()

    def _all_here(self, tie: Tie) -> bool:
        return not self._transport.mine or len(tie.ranks) == 1

    def _is_summed(self, tie: Tie) -> bool:
        """Whether a tie's gradients come from several places."""
        return bool(tie.here) and tie.here[0].requires_grad and not (self._all_here(tie) and len(tie.here) == 1)

    def _sum(self, tie: Tie) -> None:
        if not self._is_summed(tie):
            return
        before = [self._before.pop(id(parameter), None) for parameter in tie.here]
        total = torch.zeros_like(local_part(tie.here[0]), dtype=self._reduce_dtype)
        for parameter in tie.here:
            if parameter.grad is not None:
                total += local_part(parameter.grad)
        has_some = any(parameter.grad is not None for parameter in tie.here)
        found = torch.full((), float(has_some), device=total.device)
        if len(tie.ranks) > 1:
            self._transport.add([total, found], tie.ranks)
        # No rank has one: the host waits to know that only if another rank might, and this one has none.
        if not has_some and (self._all_here(tie) or not bool(found)):
            for parameter, grad in zip(tie.here, before, strict=True):
                parameter.grad = grad
            return
        for parameter, grad in zip(tie.here, before, strict=True):
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad
            local_part(parameter.grad).add_(total.to(parameter.dtype))

    def drop(self) -> None:
        """Set all gradients to None."""
        for parameter in self._parameters():
            parameter.grad = None

    def square_norm(self) -> Tensor:
        """The squared norm of the gradients of this pipeline rank. A tied parameter counts on one rank only.

        Where stages are sharded, each process counts what it holds, and the sum over those with the same stages is
        taken.
        """
        skip = {id(p) for tie in self._ties for place, p in enumerate(tie.here) if place or not tie.counted_here}
        parameters = self._parameters()
        square = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in skip:
                own = _square(local_part(parameter.grad)).to(square.device)
                square += own if self._peers is None or self._mesh is None else own * self._mesh.share(parameter)
        if self._peers is not None:
            self._peers.sum(square).wait()
        return square

    def add_up(self, number: Tensor) -> None:
        """Replace a number by its sum over all ranks, and over the shards of each."""
        if self._peers is not None:
            self._peers.sum(number).wait()
        if self._transport.mine:
            self._transport.add([number], range(self._ranks))

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before."""
        check_norm(max_norm)
        square = self.square_norm()
        if self._transport.mine:
            self._transport.add([square], range(self._ranks))
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        norm = norm_of(square, grads)
        scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        if grads:
            for device in {grad.device for grad in grads}:
                scale_each([local_part(grad) for grad in grads if grad.device == device], scale.to(device))
        return norm

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in named_parameters(self._stages)]


def norm_of(square: Tensor, grads: Iterable[Tensor | None]) -> Tensor:
    """The norm of the gradients of all ranks: in float32, or in float64 where some of these are."""
    double = any(grad is not None and grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return square.sqrt() if double else square.sqrt().float()


def _square(grad: Tensor) -> Tensor:
    if grad.is_complex():
        return grad.to(torch.complex128).abs().square().sum()
    return grad.double().square().sum()


def _add_terms(parameter: nn.Parameter) -> None:
    """If the processes that a parameter is on each have a term of its gradient, add these up.

    Autograd leaves it so where activations are sharded and the parameter is not, as in sequence parallelism. The
    optimizer would do this; a norm, or a sum over ranks, of what one process has would be wrong.
    """
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def float_of(number: Real) -> float:
    """``number`` as a float; infinite if it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_norm(max_norm: Any) -> None:
    """Raise unless ``max_norm`` is a positive number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not 0 < float_of(max_norm) < math.inf:
        raise PipelineError("max_norm must be a positive number", got=repr(max_norm), fix="pass a number such as 1.0")
