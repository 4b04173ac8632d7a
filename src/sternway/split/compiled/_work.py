"""W of a compiled graph: one call that computes the gradients of many parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sternway._storage import lies_in
from sternway._torch.dtensors import is_dtensor, with_local_part
from sternway._torch.tensors import version_of, without_autocast
from sternway.errors import PendingError
from sternway.saved import Policy
from sternway.split._accumulate import Accumulator
from sternway.split._later import Later
from sternway.split._part import Node, Part

Factors = tuple[Tensor, Tensor]
Boxed = Callable[[list[Any]], Sequence[Any]]  # a compiled graph: it takes a list, and empties it


class CompiledWork:
    """A compiled W that has yet to run; once it has, those of its gradients that are not taken yet.

    Gradients are numbered: those that I has computed first, then those of W.

    Args:
        w: the compiled W, if there is one.
        inputs: what it takes.
        computed: weight gradients that I has computed.
        is_product: for each gradient of W, whether W returns two factors, whose product it is.
        owned: for each gradient, whether it shares memory with nothing.
    """

    __slots__ = (
        "_computed",
        "_grads",
        "_held",
        "_inputs",
        "_is_product",
        "_likes",
        "_n_computed",
        "_owned",
        "_versions",
        "_w",
        "early",
        "late",
    )

    def __init__(
        self,
        w: Boxed | None,
        inputs: list[Any],
        computed: list[Any],
        is_product: Sequence[bool],
        owned: Sequence[bool],
    ) -> None:
        # A saved input of the region comes with its grad_fn; keeping that would keep the graph before it alive.
        inputs = [value.detach() if isinstance(value, Tensor) and value.requires_grad else value for value in inputs]
        self._w, self._inputs, self._computed = w, inputs, computed
        self._n_computed, self._is_product, self._owned = len(computed), is_product, owned
        self._held = tuple([value for value in (*inputs, *computed) if isinstance(value, Tensor)])
        self._versions = [version_of(tensor) for tensor in self._held]
        self._grads: list[Any] | None = None
        self._likes: dict[int, Tensor] = {}
        self.early: dict[Node, int] = {}  # by leaf, the number of its gradient
        self.late: dict[Node, int] = {}

    def claim(self, leaf: Node, number: int, like: Tensor) -> bool:
        """Note which leaf a gradient is for, and what arrived in its place; False if the leaf has one already."""
        if leaf in self.early or leaf in self.late:
            return False
        self._likes[number] = like
        (self.early if number < self._n_computed else self.late)[leaf] = number
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held

    def pack(self, policy: Policy) -> None:
        """What a compiled graph holds stays as it is."""

    def was_changed(self) -> bool:
        return self._grads is None and self._versions != [version_of(tensor) for tensor in self._held]

    def check(self) -> None:
        if self.was_changed():
            raise PendingError(
                "a tensor that W needs must not be changed in place between I and W",
                got="a changed input of a compiled W",
                fix="change a copy, or call pending.run() first",
            )

    def keep_apart(self, written: Set[int]) -> None:
        if self._grads is None and any(lies_in(tensor, written) for tensor in self._held):
            for values in (self._inputs, self._computed):
                values[:] = [value.clone() if isinstance(value, Tensor) else value for value in values]
            self._held = tuple([value for value in (*self._inputs, *self._computed) if isinstance(value, Tensor)])
            self._versions = [version_of(tensor) for tensor in self._held]

    def run(self, accumulator: Accumulator) -> None:
        parameters, numbers = [], []
        for leaf, number in (*self.early.items(), *self.late.items()):
            parameter = accumulator.writable(leaf)
            if parameter is not None:
                parameters.append(parameter)
                numbers.append(number)
            else:
                accumulator.queue(
                    leaf, [Part.of_leaf(leaf, _NO_GRAD, CompiledGradient(self, number, self._likes[number]))]
                )
        with without_autocast():  # as the graph was compiled
            for parameter, grad in zip(parameters, self._take(numbers), strict=True):
                if not isinstance(grad, tuple):
                    accumulator.add_value(parameter, grad)
                elif not accumulator.add_product(parameter, *grad):
                    accumulator.add_value(parameter, _product(parameter, *grad))
            accumulator.flush()

    def take(self, number: int, like: Tensor) -> Tensor:
        """One of the gradients, as a DTensor if ``like`` is one; each can be taken once."""
        (grad,) = self._take([number])
        with without_autocast():
            value = grad[0] @ grad[1] if isinstance(grad, tuple) else grad
        return with_local_part(like, value) if is_dtensor(like) else value

    def _take(self, numbers: list[int]) -> list[Tensor | Factors]:
        """Some of the gradients, or the factors whose product they are. The first time, W runs."""
        if not numbers:
            return []
        grads, owned = self._grads if self._grads is not None else self._compute(), self._owned
        taken = []
        for number in numbers:
            grad, grads[number] = grads[number], None
            taken.append(grad if owned[number] or type(grad) is tuple else grad.clone())
        return taken

    def _compute(self) -> list[Any]:
        inputs, grads = self._inputs, self._computed
        self._inputs, self._computed, self._held = [], [], ()
        if self._w is not None:
            with torch.no_grad(), without_autocast():
                outputs = iter(self._w(inputs))
            for is_product in self._is_product:
                grads.append((next(outputs), next(outputs)) if is_product else next(outputs))
        self._grads = grads
        return grads


class CompiledGradient(Later):
    """One gradient of a compiled W, for a parameter whose hooks the engine has to run."""

    __slots__ = ("_like", "_number", "_work")

    def __init__(self, work: CompiledWork, number: int, like: Tensor) -> None:
        self._work, self._number, self._like = work, number, like
        self.is_packed = False

    def tensors(self) -> list[Tensor]:
        return list(self._work.tensors())

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        return self._work.take(self._number, self._like)

    def keep_apart(self, written: Set[int]) -> None:
        """The work does so."""

    def was_changed(self) -> bool:
        return self._work.was_changed()


_NO_GRAD = torch.empty(0)  # a Part has the gradient of its node's output; a compiled W needs none


def _product(parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A parameter's gradient, laid out as autograd lays it out."""
    by_columns = parameter.ndim == 2 and parameter.stride(0) == 1 != parameter.stride(1)
    return (right.mT @ left.mT).mT if by_columns else left @ right
