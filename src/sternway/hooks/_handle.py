"""The handle that a registration returns."""

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
        """Remove the hooks, also for a backward that is under way. A second call does nothing."""
        self._stop()
        for handle in self._handles:
            handle.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HookError(
            "a handle of a hook cannot be pickled or copied",
            got="an attempt to do so",
            fix="leave the handle out of what is saved, and register the hook again where it is loaded",
        )
