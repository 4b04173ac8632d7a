"""One contribution to a parameter's gradient, between I, which caught it, and W, which computes it."""

from __future__ import annotations

from torch import Tensor

from sternway.errors import PendingError
from sternway.split._later import Later
from sternway.split._target import Edge


class Part:
    """One contribution to a parameter: ``later`` of ``grad``, or ``grad`` itself."""

    __slots__ = ("edge", "grad", "later", "transposed", "version")

    def __init__(self, grad: Tensor, later: Later | None, edge: Edge, transposed: bool) -> None:
        self.grad, self.later = grad, later
        self.edge = edge  # where the contribution goes
        self.transposed = transposed  # the parameter is the transpose of what the contribution is to
        self.version = grad._version

    def check(self) -> None:
        """Raise if what W needs was changed since I, as autograd does for what it saves."""
        if self.grad._version != self.version or (self.later is not None and self.later.was_changed()):
            raise PendingError(
                "what I leaves for W stays as it is",
                got=f"a tensor of shape {tuple(self.grad.shape)}, or what it is multiplied with, changed in place",
                fix="change a copy, or run W first",
            )

    def value(self, transposed: bool = False) -> Tensor:
        return self.grad if self.later is None else self.later.gradient(self.grad, transposed)

    def compute_if_from(self, storages: set[int]) -> None:
        """Compute the value now, if it is made from one of these storages."""
        if self.later is not None and any(kept.data_ptr() in storages for kept in self.later.kept):
            self.check()
            self.grad, self.later = self.reduced(), None
            self.version = self.grad._version

    def reduced(self) -> Tensor:
        """The value, summed over whatever dimensions its operand was broadcast in."""
        node, index = self.edge
        value, shape = self.value(), tuple(node._input_metadata[index].shape)
        return value if tuple(value.shape) == shape else value.sum_to_size(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad, *(self.later.kept if self.later is not None else ()))
