"""A block in which saved tensors must stay as autograd has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sternway._torch import require
from sternway._torch.saved_hooks import disable_saved_hooks, disabled_message, enable_saved_hooks
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
        message: the text of the error.

    Raises:
        SavedError: with that message, when a policy is entered in the block, or is active when the block begins.
    """
    require("saved")
    before = disabled_message()
    try:
        try:
            disable_saved_hooks(message)
        except RuntimeError as error:  # policies are active; torch has disabled them all the same
            raise SavedError(str(error)) from None
        yield
    finally:
        if before is None:
            enable_saved_hooks()
        else:
            disable_saved_hooks(before)
