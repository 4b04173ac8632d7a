"""Leave what some modules save as autograd has it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sternway.saved._policy import Policy


class Keep(Policy):
    """Leaves saved tensors as autograd has them."""


def keep(where: str | Iterable[str] | None = None, *, model: nn.Module | None = None) -> Keep:
    """Except modules from the policies around this block and inside it: their saved tensors stay as they are.

    Example:
        >>> from sternway import saved
        >>> with saved.compress("int8"), saved.keep(where="head"):
        ...     ...
        Ellipsis

    Args:
        where: patterns for names of modules; every module, unless given.
        model: the model whose names they are; the outermost module that is called, unless given.
    """
    return Keep(where, model=model)
