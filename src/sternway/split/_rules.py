"""The table of rules: for each kind of autograd node, which operands may be weights and how their gradient is computed.

A rule is a function of the node, called in I before the node runs. It reads the saved tensors that W needs off the node
and returns a ``Later``, or None where the operand's gradient equals the output's. A node kind without a rule is
computed whole in I, once; W only accumulates its weight gradients.

What is deferred is what takes time: matrix products, convolutions and embedding tables. A norm's weight gradient is
not: the kernel that computes its input gradient computes it too, while deferring it would hold two whole activations
for one vector. So norms have no rule, by choice. A bias is deferred if the weight of its node is, for which the
output's gradient is held anyway; otherwise it is computed in I.
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
    """One operand that may be a weight: its index in ``node.next_functions``, and its rule."""

    position: int
    function: RuleFunction


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of a node kind that have rules, by role: when each is deferred."""

    weights: tuple[Operand, ...] = ()  # whenever it is made of parameters
    lefts: tuple[Operand, ...] = ()  # if no weight is: the left side of a product is seldom a weight
    biases: tuple[Operand, ...] = ()  # if a weight or left of the node is


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
        operand: the operand's index in ``node.next_functions``. Call once for each operand of a kind.
        role: a "weight" is deferred whenever it is made of parameters; a "left" if no weight of the node is; a "bias"
            if a weight or left of the node is, since the output's gradient is not worth holding for a bias alone.

    The rule is used for nodes with one output. It replaces an earlier rule for the same kind and operand. It returns a
    ``Later``, or None where the operand's gradient equals the output's. Sums over broadcast dimensions are done for it.
    """
    if not isinstance(kind, str) or not kind:
        raise SplitError(
            "a rule must name a node kind",
            got=repr(kind),
            fix="pass type(tensor.grad_fn).__name__, such as 'MyOpBackward'",
        )
    if not isinstance(operand, int) or operand < 0:
        raise SplitError("operand must be an index into node.next_functions", got=repr(operand), fix="pass 0, 1, 2, …")

    field = _FIELDS.get(role)
    if field is None:
        raise SplitError("role must be 'weight', 'left' or 'bias'", got=repr(role), fix="pass one of the three")

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
