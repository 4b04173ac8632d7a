"""The table of rules: for each kind of autograd node, which operands may be weights and how their gradient is computed.

A rule is a function of the node, called in I before the node runs. It reads what W will need off the node's saved
tensors and returns a ``Later``. A node kind without a rule is computed whole in I, once; only the accumulation of its
weight gradients waits.

Policy. What waits in W is what costs time: matrix products, convolutions and embedding tables. A norm's weight
gradient is not worth waiting for: the kernel that computes its input gradient computes it on the way, while waiting
would hold two whole activations for one vector. So norms have no rule, by choice. A bias rides along: it waits if its
node's output gradient is held for the weight anyway, and is computed in I if it would be held for the bias alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from sternway.errors import SplitError
from sternway.split._later import Later

RuleFunction = Callable[[Any], Later]


class Role(IntEnum):
    """When an operand waits, in the order in which a node's operands are looked at."""

    WEIGHT = 0  # whenever it is made of parameters
    OTHER_SIDE = 1  # if no weight of the node does: the left side of a product, where weights seldom stand
    RIDER = 2  # if another operand of the node does: a bias


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand that may be a weight: its place in ``node.next_functions``, its rule, and when it waits."""

    position: int
    function: RuleFunction
    role: Role


RULES: dict[str, tuple[Operand, ...]] = {}
"""The table: a node kind's operands, in the order of their roles."""


def rule(
    kind: str, operand: int = 0, *, role: Literal["weight", "other_side", "rider"] = "weight"
) -> Callable[[RuleFunction], RuleFunction]:
    """Teach the split one operand of a node kind, such as a custom ``autograd.Function``.

    Example:
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, weight):
        ...         ctx.save_for_backward(x, weight)
        ...         return x * weight
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, weight = ctx.saved_tensors
        ...         return grad * weight, (grad * x).sum(0) if ctx.needs_input_grad[1] else None
        >>> @rule("ScaleBackward", operand=1)
        ... def scale_weight(node):
        ...     x, weight = node.saved_tensors
        ...     return Later(lambda grad, x: (grad * x).sum(0), x)

    Args:
        kind: the node's type name, as ``type(tensor.grad_fn).__name__`` gives it.
        operand: the operand's place among the inputs (its index in ``node.next_functions``). Several operands of a
            kind are taught by several calls.
        role: "weight" waits whenever it is made of parameters; "other_side" if no weight of the node does; "rider" if
            another operand of the node does, as a bias, for which alone the output's gradient is not worth holding.

    The rule is used for nodes with one output. It replaces an earlier rule for the same kind and operand.
    A ``Later`` may return a gradient that has yet to be summed over broadcast dimensions.
    """
    if not isinstance(kind, str) or not kind:
        raise SplitError(
            "a rule names a node kind",
            got=repr(kind),
            fix="pass type(tensor.grad_fn).__name__, such as 'MyOpBackward'",
        )
    if not isinstance(operand, int) or operand < 0:
        raise SplitError("operand is an index into node.next_functions", got=repr(operand), fix="pass 0, 1, 2, …")

    if role not in ("weight", "other_side", "rider"):
        raise SplitError(
            "an operand's role is one of three", got=repr(role), fix="pass 'weight', 'other_side' or 'rider'"
        )

    def register(function: RuleFunction) -> RuleFunction:
        others = [other for other in RULES.get(kind, ()) if other.position != operand]
        RULES[kind] = tuple(sorted([*others, Operand(operand, function, Role[role.upper()])], key=lambda o: o.role))
        return function

    return register
