"""What I catches at a cut, and the parts of W that come of it."""

from __future__ import annotations

from torch import Tensor

from sternway.errors import PendingError
from sternway.saved import Packed, Policy
from sternway.split._later import Later
from sternway.split._plan import Cut
from sternway.split._saved import Unopened, read_again
from sternway.split._target import Edge


class Catch:
    """What I caught at one cut."""

    __slots__ = ("cut", "grads", "laters")

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.grads: list[tuple[Tensor | None, ...]] = []  # of the node's output, once it has arrived
        self.laters: list[Later] = []  # by wait, once read

    def read(self) -> None:
        """Read off the node what W needs."""
        node = Unopened(self.cut.node) if self.cut.packed else self.cut.node
        self.laters = [wait.operand.function(node) for wait in self.cut.waits]

    def read_and_keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """The same as the node is about to run: under a checkpoint it must be then, and unpacking is best then."""
        if self.cut.checkpointed:
            read_again(self.cut.node, times=len(self.cut.waits))
        self.read()
        self.grads.append(grads)


class Part:
    """One contribution to a parameter: ``later`` of ``grad``, or ``grad`` itself."""

    __slots__ = ("edge", "grad", "later", "packed", "transposed", "version")

    def __init__(self, grad: Tensor, later: Later | None, edge: Edge, transposed: bool) -> None:
        self.grad: Tensor = grad
        self.later = later
        self.packed: Packed | None = None  # in place of grad, if a policy has it
        self.edge = edge  # where the contribution goes
        self.transposed = transposed  # the parameter is the transpose of what the contribution is to
        self.version = grad._version

    def pack(self, policy: Policy) -> None:
        """Let a policy have what is held."""
        if self.packed is None:
            self.check()
            self.packed = policy.pack(self.grad)
            self.grad = self.grad.new_empty(0)
            if self.later is not None:
                self.later.pack(policy.pack)

    @property
    def is_packed(self) -> bool:
        """Whether a policy has some of what W needs."""
        return self.packed is not None or (self.later is not None and self.later.is_packed)

    def ready(self) -> None:
        """Bring back what is packed, and check."""
        if self.packed is not None:
            self.grad, self.packed = self.packed.unpack(), None
            self.version = self.grad._version
        if self.later is not None:
            self.later.unpack()
        self.check()

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
        if self.later is not None and any(kept.data_ptr() in storages for kept in self.later.tensors()):
            self.ready()
            self.grad, self.later = self.reduced(), None
            self.version = self.grad._version

    def reduced(self) -> Tensor:
        """The value, summed over whatever dimensions its operand was broadcast in."""
        node, index = self.edge
        value, shape = self.value(), tuple(node._input_metadata[index].shape)
        return value if tuple(value.shape) == shape else value.sum_to_size(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        grad = [self.grad] if self.packed is None else self.packed.tensors()
        return (*grad, *(self.later.tensors() if self.later is not None else ()))
