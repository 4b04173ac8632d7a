"""A user's own pair of saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sternway.saved._policy import Policy, PolicyStack


class Hooks(Policy):
    """A user's own pair of hooks, as a policy; a tensor that ``pack_hook`` returns goes on to the policies around it.

    If there are none, torch gets the pair itself.
    """

    def __init__(self, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.pack_hook, self.unpack_hook = pack_hook, unpack_hook

    def _pair(self, stack: PolicyStack) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        return (self.pack_hook, self.unpack_hook) if stack.policies == (self,) else super()._pair(stack)
