"""Which Functions may be tried: those that a user names."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from sternway._torch import require
from sternway.errors import SplitError
from sternway.split.learned._record import CHOSEN, LOCK, NAMESAKES, RECORDS


def learn(*functions: type[Function], exact: bool = True) -> None:
    """Let the split find out whether the backward of custom Functions can be called in two parts.

    The first time that ``backward_input`` meets one of them, its backward is called whole, as always. Then it is called
    again on the same tensors, for its inputs alone and for its weights alone, by ``ctx.needs_input_grad``. If the
    gradients are those of the whole call, and the two parts do not take much longer, it is split from then on: the
    weights' part waits for W. ``split.kinds()`` shows what was found.

    In a trial a backward is called several times. It must have no effect beside the gradients that it returns; one
    that is noticed stays whole. So nothing is tried unless it is named here.

    Example:
        >>> from sternway import split
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, weight):
        ...         ctx.save_for_backward(x, weight)
        ...         return x @ weight
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, weight = ctx.saved_tensors
        ...         of_x, of_weight = ctx.needs_input_grad
        ...         return grad @ weight.t() if of_x else None, x.t() @ grad if of_weight else None
        >>> split.learn(Scale)
        >>> split.unlearn(Scale)

    Args:
        functions: the classes, and with them their subclasses. ``torch.autograd.Function`` is every Function that is
            not torch's own.
        exact: whether both parts must give the whole call's gradients in every bit. Otherwise they may differ within
            rounding, as ``torch.testing.assert_close`` has it; ``backward_input(exact=True)`` then does not split it.

    Raises:
        SplitError: something else than a class of Functions was passed.
    """
    require("split.learned")
    _choose(functions, exact)


def unlearn(*functions: type[Function]) -> None:
    """Let the backward of Functions be called whole, also of those that ``learn`` named a base of; forget trials.

    Example:
        >>> from sternway import split
        >>> split.unlearn(torch.autograd.Function)
    """
    _choose(functions, None)


def _choose(functions: tuple[Any, ...], exact: bool | None) -> None:
    for function in functions:
        SplitError.unless(
            isinstance(function, type) and issubclass(function, Function),
            "learn and unlearn take classes of autograd Functions",
            function,
            "pass the class on which apply is called, not a tensor or a node",
        )
    with LOCK:
        for function in functions:
            CHOSEN[function] = exact
            NAMESAKES.clear()
            for known in [each for each in RECORDS if issubclass(each, function)]:
                del RECORDS[known]
