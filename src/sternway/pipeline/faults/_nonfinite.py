"""Which module produced the infinities and NaNs in a step's gradients?

Good steps cost nothing extra. A step that is known to be bad runs once more, from the same random state, with hooks
that look at the inputs and outputs of each module, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sternway._torch.tensors import without_torch_function
from sternway._tree import leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import Absent

OnNonfinite = Literal["raise", "skip"]
"""What to do about a step whose gradients are not finite."""


def check_nonfinite(value: Any, optional: bool) -> None:
    """Raise unless ``value`` is an ``OnNonfinite``, or None where that is allowed."""
    if value not in ("raise", "skip") and not (optional and value is None):
        raise PipelineError('nonfinite must be "raise" or "skip"', got=repr(value), fix='pass nonfinite="skip"')


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values first stop being finite, as far as one rank sees."""

    rank: int
    stage: int
    module: str
    what: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.what} of {self.module} (rank {self.rank}, stage {self.stage})"


def first(found: list[Origin]) -> Origin | None:
    """The earliest of all ranks' origins: the forward before the backward, and each in its own direction."""
    return min(found, key=lambda o: (o.backward, -o.stage if o.backward else o.stage), default=None)


@contextmanager
def looking(stages: Mapping[int, nn.Module], rank_of: tuple[int, ...]) -> Iterator[list[Origin]]:
    """A block in which each module is noted that makes nonfinite values from finite ones."""
    found: list[Origin] = []
    handles = []
    for index, stage in stages.items():
        for name, module in stage.named_modules():
            if not any(True for _ in module.children()):
                look = _Look(found, rank_of[index], index, name or type(module).__name__)
                handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Look:
    """A forward hook of one module, which also puts hooks on its inputs and outputs for the backward."""

    def __init__(self, found: list[Origin], rank: int, stage: int, name: str) -> None:
        self._found, self._rank, self._stage, self._name = found, rank, stage, name

    def __call__(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        taken, made = _floats([inputs, keywords]), _floats(output)
        if any(isinstance(tensor, Absent) for tensor in [*taken, *made]):
            return  # another stage runs it
        with without_torch_function():  # other ranks do not look, and would take this for code of the model
            self._look(taken, made)

    def _look(self, taken: list[Tensor], made: list[Tensor]) -> None:
        if all(map(finite, taken)):
            for tensor in made:
                if not finite(tensor):
                    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
                    self._note(f"{bad} of {tensor.numel()} numbers in the output", backward=False)
        grads: list[bool] = []  # whether the gradients of the outputs are finite
        for tensor in made:
            if tensor.requires_grad:
                _on_grad(tensor, lambda grad: grads.append(finite(grad)))
        for tensor in taken:
            if tensor.requires_grad:
                _on_grad(tensor, lambda grad: self._came_back(grad, grads))

    def _came_back(self, grad: Tensor, grads: list[bool]) -> None:
        if all(grads) and not finite(grad):
            self._note("the gradient of the input", backward=True)

    def _note(self, what: str, backward: bool) -> None:
        self._found.append(Origin(self._rank, self._stage, self._name, what, backward))


def in_losses(losses: Iterable[Tensor], stage: int, rank: int) -> list[Origin]:
    """The loss, if it is not finite."""
    return [] if all(map(finite, losses)) else [Origin(rank, stage, "the loss", "the value", backward=False)]


def in_gradients(stages: Mapping[int, nn.Module], rank_of: tuple[int, ...]) -> list[Origin]:
    """The last parameter whose gradient is not finite: the backward begins with the last."""
    for index in sorted(stages, reverse=True):
        for name, parameter in reversed(list(stages[index].named_parameters())):
            if parameter.grad is not None and not finite(parameter.grad):
                return [Origin(rank_of[index], index, name, "the gradient", backward=True)]
    return []


def finite(tensor: Tensor) -> bool:
    """Whether all elements are finite."""
    return bool(torch.isfinite(tensor).all())


def _on_grad(tensor: Tensor, look: Callable[[Tensor], None]) -> None:
    tensor.register_hook(look)  # type: ignore[no-untyped-call]  # torch's


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
