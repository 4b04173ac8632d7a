"""The table of rules: for each kind of autograd node, which operands may be weights and how their gradient is computed.

A rule is a function of the node, called in I before the node runs. It reads what W will need off the node's saved
tensors and returns a ``Later``, or None where the output's gradient is the operand's as it is. A node kind without a
rule is computed whole in I, once; only the accumulation of its weight gradients waits.

Policy. What waits in W is what costs time: matrix products, convolutions and embedding tables. A norm's weight
gradient is not worth waiting for: the kernel that computes its input gradient computes it on the way, while waiting
would hold two whole activations for one vector. So norms have no rule, by choice. A bias rides along: it waits if its
node's output gradient is held for the weight anyway, and is computed in I if it would be held for the bias alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sternway.errors import SplitError
from sternway.split._later import Later

RuleFunction = Callable[[Any], Later | None]


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand that may be a weight: its place in ``node.next_functions``, and its rule."""

    position: int
    function: RuleFunction


@dataclass(frozen=True, slots=True)
class Operands:
    """What a node kind's rules cover, by when an operand waits."""

    weights: tuple[Operand, ...] = ()  # whenever it is made of parameters
    lefts: tuple[Operand, ...] = ()  # if no weight does: the left of a product, where weights seldom stand
    biases: tuple[Operand, ...] = ()  # if another operand of the node does: a bias


RULES: dict[str, Operands] = {}
"""The table, by node kind."""


def rule(
    kind: str, operand: int = 0, *, role: Literal["weight", "left", "bias"] = "weight"
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
        role: "weight" waits whenever it is made of parameters; "left" if no weight of the node does; "bias" if
            another operand of the node does, as a bias, for which alone the output's gradient is not worth holding.

    The rule is used for nodes with one output. It replaces an earlier rule for the same kind and operand.
    What it returns is a ``Later``, or None where the output's gradient is the operand's as it is. Either gradient may
    have yet to be summed over broadcast dimensions.
    """
    if not isinstance(kind, str) or not kind:
        raise SplitError(
            "a rule names a node kind",
            got=repr(kind),
            fix="pass type(tensor.grad_fn).__name__, such as 'MyOpBackward'",
        )
    if not isinstance(operand, int) or operand < 0:
        raise SplitError("operand is an index into node.next_functions", got=repr(operand), fix="pass 0, 1, 2, …")

    field = _FIELDS.get(role)
    if field is None:
        raise SplitError("an operand's role is one of three", got=repr(role), fix="pass 'weight', 'left' or 'rider'")

    def register(function: RuleFunction) -> RuleFunction:
        known = RULES.get(kind, Operands())
        others = {
            name: tuple(other for other in getattr(known, name) if other.position != operand)
            for name in _FIELDS.values()
        }
        RULES[kind] = Operands(**others | {field: (*others[field], Operand(operand, function))})
        return function

    return register


_FIELDS = {"weight": "weights", "left": "lefts", "bias": "biases"}
