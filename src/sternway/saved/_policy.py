"""Policies, and the stack of those that are active in a thread.

torch calls only the innermost pair of saved-tensor hooks. Every policy of ours installs the same pair, which asks the
whole stack. So policies compose, and the order of nesting matters only between two of a kind, where the inner one
decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from sternway._bytes import parse_bytes
from sternway._torch import require
from sternway._torch.saved_hooks import pop_saved_hooks, push_saved_hooks
from sternway.errors import SavedError
from sternway.saved._attach import Attached
from sternway.saved._modules import Names, Where
from sternway.saved._report import Report


class PolicyStack:
    """Policies, outermost first, and what their blocks share: the report, and the names of modules."""

    def __init__(self, *policies: Policy) -> None:
        self.policies: list[Policy] = []
        self.report = Report()
        self.names = Names()
        for policy in policies:
            self.push(policy)

    def push(self, policy: Policy) -> None:
        """A block of the policy begins."""
        self.policies.append(policy)
        if policy.model is not None:
            self.names.know(policy.model)

    def remove(self, policy: Policy) -> None:
        """A block of the policy ends: the innermost one, if there are several."""
        del self.policies[len(self.policies) - 1 - self.policies[::-1].index(policy)]


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack = PolicyStack()


_active = _Active()


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
        from sternway.saved._pack import pack, unpack

        try:
            push_saved_hooks(pack, unpack)
        except RuntimeError as error:  # forbidden, by us or by torch
            raise SavedError(str(error)) from None
        try:
            self._opened()
        except BaseException:
            pop_saved_hooks()
            raise
        if not _active.stack.policies:
            _active.stack = PolicyStack()
        stack = _active.stack
        stack.push(self)
        return stack.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pop_saved_hooks()
        _active.stack.remove(self)
        self._closed(kind is not None)

    def attach(self, model: nn.Module) -> Attached:
        """Be active in each forward of ``model`` from now on, whoever calls it.

        For training loops that are not yours: ``transformers.Trainer``, TRL's trainers, accelerate.

        Example:
            >>> import tempfile, torch
            >>> from sternway import saved
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
            >>> policy = saved.offload(to="disk", directory=tempfile.gettempdir(), min_bytes=0)
            >>> attached = policy.attach(model)
            >>> model(torch.ones(4, 8)).sum().backward()
            >>> attached.report.moved_bytes
            256

        Returns:
            A handle with the ``report`` of the last forward. Its ``remove()`` ends it.
        """
        SavedError.unless(isinstance(model, nn.Module), "model must be an nn.Module", model, "pass the model")
        return Attached(self, model)

    def _opened(self) -> None:
        """A block begins."""

    def _closed(self, failed: bool) -> None:
        """A block ends, by an error or not."""

    def pack(self, tensor: Tensor) -> Any:
        """Treat one tensor as if autograd had saved it; ``.unpack()`` of the result is the tensor again.

        For tensors that autograd does not save but that wait as long, such as those between I and W of a split.
        """
        require("saved")
        from sternway.saved._pack import pack_under

        return pack_under(PolicyStack(self), tensor.detach())


def active() -> PolicyStack:
    """The policies of this thread."""
    return _active.stack
