"""Which module made a step's gradients infinite or not a number?

A step costs the same whether anyone asks or not: only a step that is known to be bad is run once more, from the random
numbers it had, with a look at what goes into each module and comes out of it, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway._tree import leaves
from sternway.pipeline._stage import Stage


@dataclass(frozen=True, slots=True)
class Origin:
    """Where numbers first stop being finite, as far as one rank sees."""

    rank: int
    stage: int
    module: str
    what: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.what} of {self.module} (rank {self.rank}, stage {self.stage})"


def first(found: list[Origin]) -> Origin | None:
    """Of all ranks' origins the one that comes first: forward before backward, and each in its own direction."""
    return min(found, key=lambda o: (o.backward, -o.stage if o.backward else o.stage), default=None)


@contextmanager
def looking(stages: dict[int, Stage], rank_of: tuple[int, ...]) -> Iterator[list[Origin]]:
    """While this is open, note each module that makes what is not finite from what is."""
    found: list[Origin] = []
    handles = []
    for index, stage in stages.items():
        for name, module in stage.module.named_modules():
            if not any(True for _ in module.children()):
                look = _Look(found, rank_of[index], index, name or type(module).__name__)
                handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Look:
    """A forward hook of one module, which hangs hooks on its inputs and outputs for the backward."""

    def __init__(self, found: list[Origin], rank: int, stage: int, name: str) -> None:
        self._found, self._rank, self._stage, self._name = found, rank, stage, name

    def __call__(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        taken, made = _floats([inputs, keywords]), _floats(output)
        if all(map(finite, taken)):
            for tensor in made:
                if not finite(tensor):
                    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
                    self._note(f"{bad} of {tensor.numel()} numbers in the output", backward=False)
        grads: list[bool] = []  # whether the gradients of the outputs are finite
        for tensor in made:
            if tensor.requires_grad:
                on_grad(tensor, lambda grad: grads.append(finite(grad)))
        for tensor in taken:
            if tensor.requires_grad:
                on_grad(tensor, lambda grad: self._came_back(grad, grads))

    def _came_back(self, grad: Tensor, grads: list[bool]) -> None:
        if all(grads) and not finite(grad):
            self._note("the gradient of the input", backward=True)

    def _note(self, what: str, backward: bool) -> None:
        self._found.append(Origin(self._rank, self._stage, self._name, what, backward))


def in_loss(stage: Stage, rank: int) -> Origin | None:
    """The loss, if what goes into it is finite and it is not."""
    if all(map(finite, stage.losses.values())):
        return None
    return Origin(rank, stage.index, "the loss", "the value", backward=False)


def in_gradients(stages: dict[int, Stage], rank_of: tuple[int, ...]) -> Origin | None:
    """The last parameter whose gradient is not finite: gradients come from behind."""
    for index in sorted(stages, reverse=True):
        for name, parameter in reversed(list(stages[index].module.named_parameters())):
            if parameter.grad is not None and not finite(parameter.grad):
                return Origin(rank_of[index], index, name, "the gradient", backward=True)
    return None


def on_grad(tensor: Tensor, look: Callable[[Tensor], None]) -> None:
    """Have ``look`` see the tensor's gradient in the backward to come."""
    tensor.register_hook(look)  # type: ignore[no-untyped-call]  # torch's


def finite(tensor: Tensor) -> bool:
    """Whether every number is."""
    return bool(torch.isfinite(tensor).all())


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
