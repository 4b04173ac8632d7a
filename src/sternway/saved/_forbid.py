"""A region in which nothing may come between autograd and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import _autograd

from sternway.errors import SavedError


@contextmanager
def forbid(message: str) -> Iterator[None]:
    """Refuse policies, and saved-tensor hooks of any kind, in this block.

    Example:
        >>> from sternway import saved
        >>> with saved.forbid("not in here"), saved.compress("int8"):
        ...     ...
        Traceback (most recent call last):
        ...
        sternway.errors.SavedError: not in here

    Args:
        message: what the error says.

    Raises:
        SavedError: with that message, when a policy is entered in the block, or is active when the block begins.
    """
    before = _autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        try:
            _autograd._saved_tensors_hooks_disable(message)
        except RuntimeError as error:  # policies are active; torch has disabled them all the same
            raise SavedError(str(error)) from None
        yield
    finally:
        if before is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(before)
