"""Policies, and the stack of those that are active.

torch calls only the innermost pair of saved-tensor hooks. So a policy installs a pair that asks the policies around it
too: it takes their stack from the pair that is installed already. Policies compose, and the order of nesting matters
only between two of a kind, where the inner one decides. torch alone knows which pair is active; there is nothing beside
it that a block which is never left could spoil.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from sternway._bytes import parse_bytes
from sternway._torch import require
from sternway._torch.saved_hooks import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from sternway.errors import SavedError
from sternway.saved._modules import Names, Where
from sternway.saved._report import Report


class PolicyStack:
    """Policies, outermost first, and what their blocks share: the report, and the names of modules."""

    def __init__(self, *policies: Policy, within: PolicyStack | None = None) -> None:
        self.policies: tuple[Policy, ...] = (*(within.policies if within is not None else ()), *policies)
        self.report: Report = within.report if within is not None else Report()
        self.names: Names = within.names if within is not None else Names()
        self.thread = threading.get_ident()
        for policy in policies:
            if policy.model is not None:
                self.names.know(policy.model)

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook."""
        from sternway.saved._pack import pack_under

        return pack_under(self, tensor)


def active() -> PolicyStack | None:
    """The policies whose pair of hooks is the one that torch calls in this thread."""
    stack = getattr(top_saved_hooks()[0], "__self__", None)
    return stack if isinstance(stack, PolicyStack) else None


class Policy:
    """Base of all policies: a context manager that says what becomes of the tensors that autograd saves in its block.

    A policy can be entered any number of times. It may learn from one step for the next, so make it once and enter it
    in every step.
    """

    def __init__(
        self, where: str | Iterable[str] | None = None, min_bytes: int | str = 0, model: nn.Module | None = None
    ) -> None:
        self.where = Where(where)
        self.min_bytes = parse_bytes(min_bytes, "min_bytes", SavedError)
        self.model = model

    def __enter__(self) -> Report:
        require("saved")
        stack = PolicyStack(self, within=active())
        try:
            push_saved_hooks(*self._pair(stack))
        except RuntimeError as error:  # forbidden, by us or by torch
            raise SavedError(str(error)) from None
        try:
            self._opened()
        except BaseException:
            pop_saved_hooks()
            raise
        return stack.report

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        pop_saved_hooks()
        self._closed(kind is not None)

    def _pair(self, stack: PolicyStack) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """The pair of hooks to install; ``stack`` is this policy and those around it."""
        from sternway.saved._pack import unpack

        return stack.pack, unpack

    def _opened(self) -> None:
        """A block begins."""

    def _closed(self, failed: bool) -> None:
        """A block ends, by an error or not."""

    def pack(self, tensor: Tensor) -> Any:
        """Treat one tensor as if autograd had saved it; ``.unpack()`` of the result is the tensor again.

        For tensors that autograd does not save but that wait as long, such as those between I and W of a split.
        """
        require("saved")
        return PolicyStack(self).pack(tensor.detach())
