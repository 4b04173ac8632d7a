"""What a registration returns: remove it, or leave a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.hooks import RemovableHandle

from sternway.errors import HookError


class Handle(RemovableHandle):
    """Several hooks that are removed as one: by ``remove()``, or at the end of a ``with`` block.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> from sternway import hooks
        >>> with hooks.on_grads([x], print):
        ...     (3 * x).sum().backward()
        (tensor([3.]),)
        >>> (3 * x).sum().backward()
    """

    def __init__(self, handles: list[RemovableHandle], stop: Callable[[], None]) -> None:
        self._handles, self._stop = handles, stop

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing. A backward that is under way does not call them any more."""
        self._stop()
        for handle in self._handles:
            handle.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HookError(
            "a hook's handle belongs to the process and the graph that it was made in",
            got="an attempt to pickle or copy it",
            fix="leave the handle out of what is saved, and register the hook again where it is loaded",
        )
