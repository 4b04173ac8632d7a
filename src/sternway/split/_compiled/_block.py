"""What a compiled graph leaves to W: one call that computes the gradients of many parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sternway.errors import PendingError
from sternway.split._compiled._wiring import Wiring
from sternway.split._later import Later
from sternway.split._target import Node

Factors = tuple[Tensor, Tensor]
Boxed = Callable[[list[Any]], Sequence[Any]]  # a compiled graph: it empties the list as it goes


class Waiting:
    """One W that waits: its inputs until it has run, then those of its gradients that nobody has taken yet.

    Args:
        w: the compiled W, if there is one.
        inputs: what it takes.
        early: weight gradients that I has computed; they stand before those that W computes.
        wiring: which of the gradients are products yet to be done, and which share memory with nothing.
    """

    __slots__ = ("_early", "_grads", "_inputs", "_versions", "_w", "_wiring", "kept")

    def __init__(self, w: Boxed | None, inputs: list[Any], early: list[Any], wiring: Wiring) -> None:
        # A saved input of the graph comes back with its history; holding that would hold the graph before it.
        inputs = [value.detach() if isinstance(value, Tensor) and value.requires_grad else value for value in inputs]
        self._w, self._inputs, self._early, self._wiring = w, inputs, early, wiring
        self.kept = tuple([value for value in (*inputs, *early) if isinstance(value, Tensor)])
        self._versions = [tensor._version for tensor in self.kept]
        self._grads: list[Any] | None = None

    def was_changed(self) -> bool:
        return self._grads is None and self._versions != [tensor._version for tensor in self.kept]

    def check(self) -> None:
        """Raise if what W needs was changed since I, as autograd does for what it saves."""
        if self.was_changed():
            raise PendingError(
                "what I leaves for W stays as it is",
                got="an input of a compiled W changed in place",
                fix="change a copy, or run W first",
            )

    def take(self, indices: list[int]) -> list[Tensor | Factors]:
        """Some of the gradients, each once, or the factors whose product they are; the first asked for runs W."""
        if not indices:
            return []
        grads, own = self._grads if self._grads is not None else self._compute(), self._wiring.own
        taken = []
        for index in indices:
            grad, grads[index] = grads[index], None
            taken.append(grad if own[index] or type(grad) is tuple else grad.clone())
        return taken

    def take_one(self, index: int) -> Tensor:
        """One of the gradients."""
        (grad,) = self.take([index])
        with torch._C._DisableAutocast():
            return grad[0] @ grad[1] if isinstance(grad, tuple) else grad

    def _compute(self) -> list[Any]:
        inputs, grads = self._inputs, self._early
        self._inputs, self._early, self.kept = [], [], ()
        if self._w is not None:
            with torch.no_grad(), torch._C._DisableAutocast():
                outputs = iter(self._w(inputs))
            for _, is_product in self._wiring.late:
                grads.append((next(outputs), next(outputs)) if is_product else next(outputs))
        self._grads = grads
        return grads


class Block:
    """A W that waits, and where its gradients go: by leaf, their places among them."""

    __slots__ = ("early", "late", "waiting")

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.early: dict[Node, int] = {}
        self.late: dict[Node, int] = {}


class Late(Later):
    """One gradient of a block, for a parameter that the engine has to see to."""

    __slots__ = ("_index", "_waiting")

    def __init__(self, waiting: Waiting, index: int) -> None:
        self._waiting, self._index = waiting, index
        self.is_packed = False

    @property
    def kept(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # it empties when W has run
        return self._waiting.kept

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        return self._waiting.take_one(self._index)

    def was_changed(self) -> bool:
        return self._waiting.was_changed()
