"""A cut, where I and W part, and the parts of W that come of it: planned, then read, then given their gradient."""

from __future__ import annotations

from torch import Tensor

from sternway.errors import PendingError
from sternway.saved import Packed, Policy
from sternway.split._later import Later
from sternway.split._rules import RuleFunction
from sternway.split._saved import Packing, Unopened, read_again
from sternway.split._target import Edge, Node, leaves_behind


class Part:
    """One contribution to a parameter: ``later`` of ``grad``, or ``grad`` itself.

    Args:
        edge: where the contribution goes.
        leaf: the parameter's AccumulateGrad node, if the edge leads straight to one.
        transposed: whether the parameter is the transpose of what the contribution is to.
        position: of the operand among those of the cut.
        rule: what tells from the cut's node how the contribution is computed.
    """

    __slots__ = ("edge", "grad", "later", "leaf", "packed", "position", "rule", "transposed", "version")

    grad: Tensor
    version: int

    def __init__(
        self,
        edge: Edge,
        leaf: Node | None,
        transposed: bool = False,
        position: int = 0,
        rule: RuleFunction | None = None,
    ) -> None:
        self.edge = edge
        self.leaf = leaf
        self.transposed = transposed
        self.position = position
        self.rule = rule
        self.later: Later | None = None
        self.packed: Packed | None = None  # in place of grad, if a policy has it

    @classmethod
    def of_leaf(cls, leaf: Node, grad: Tensor, later: Later | None = None) -> Part:
        """A contribution that is there already, or is made by ``later``."""
        part = cls((leaf, 0), leaf)
        part.later = later
        part.grad, part.version = grad, grad._version
        return part

    def leaves(self) -> list[Node]:
        """Every leaf that the contribution reaches."""
        return [self.leaf] if self.leaf is not None else leaves_behind(self.edge)

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
        if self.later is not None:
            return self.later.gradient(self.grad, transposed)
        return self.grad.mT if transposed else self.grad

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


class Cut:
    """A spine node some of whose operands wait.

    Args:
        node: the node.
        parts: what waits, an operand each.
        packing: who packed its saved tensors.
        runs_in_i: False at the bottom of stage 0, where nothing below needs a gradient.
    """

    __slots__ = ("grads", "node", "packing", "parts", "runs_in_i")

    def __init__(self, node: Node, parts: list[Part], packing: Packing, runs_in_i: bool) -> None:
        self.node = node
        self.parts = parts
        self.packing = packing
        self.runs_in_i = runs_in_i
        self.grads: list[tuple[Tensor | None, ...]] = []  # of the node's output, once it has arrived

    @property
    def is_read_as_it_runs(self) -> bool:
        """Whether W's needs are read as the node is about to run: a checkpoint demands it; unpacking is best then."""
        return self.packing is Packing.CHECKPOINT or (self.packing is Packing.OURS and self.runs_in_i)

    def read(self) -> None:
        """Read off the node what W needs."""
        node = Unopened(self.node) if self.packing is Packing.OURS else self.node
        for part in self.parts:
            part.later = part.rule(node)  # type: ignore[misc]  # a cut's parts have theirs

    def read_and_keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """The same, with the gradient, as the node is about to run."""
        if self.packing is Packing.CHECKPOINT:
            read_again(self.node, times=len(self.parts))
        self.read()
        self.grads.append(grads)
