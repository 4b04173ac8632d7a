"""A user's own pair of saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sternway.saved._policy import Policy


class Hooks(Policy):
    """A user's own pair of hooks, as a policy; a tensor that ``pack_hook`` returns goes on to the other policies."""

    def __init__(self, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.pack_hook, self.unpack_hook = pack_hook, unpack_hook
