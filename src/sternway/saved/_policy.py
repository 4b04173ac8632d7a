"""Policies, and the stack of those that are active in a thread.

torch obeys only the innermost pair of saved-tensor hooks. Every policy of ours installs the same pair, which asks the
whole stack; so nesting composes, and the order of nesting does not matter except between two of a kind, where the inner
one decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sternway._bytes import parse_bytes
from sternway.errors import SavedError
from sternway.saved._modules import Names, Where
from sternway.saved._report import Report


class Block:
    """This thread's policies, outermost first, and what the outermost one's block knows."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self.policies = list(policies)
        self.report = Report()
        self.names = Names(policy.model for policy in self.policies if policy.model is not None)


class _Active(threading.local):
    def __init__(self) -> None:
        self.block = Block()


_active = _Active()


class Policy:
    """A ``with`` block in which saved tensors are treated in some way. It can be entered any number of times.

    What it learns of a step serves the next, so make a policy once and enter it in every step.
    """

    def __init__(
        self, where: str | Iterable[str] | None = None, min_bytes: int | str = 0, model: nn.Module | None = None
    ) -> None:
        self.where = Where(where)
        self.min_bytes = parse_bytes(min_bytes, "min_bytes", SavedError)
        self.model = model

    def __enter__(self) -> Report:
        push_hooks()
        try:
            self._opened()
        except BaseException:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            raise
        if not _active.block.policies:
            _active.block = Block()
        block = _active.block
        block.policies.append(self)
        if self.model is not None:
            block.names.know(self.model)
        return block.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        policies = _active.block.policies
        del policies[len(policies) - 1 - policies[::-1].index(self)]
        self._closed(kind is not None)

    def _opened(self) -> None:
        """A block begins."""

    def _closed(self, failed: bool) -> None:
        """A block ends, by an error or not."""

    def pack(self, tensor: Tensor) -> Any:
        """Treat one tensor as if autograd had saved it; ``.unpack()`` of what comes back is the tensor again.

        For tensors that are not autograd's but wait like its own, as between I and W of a split backward.
        """
        from sternway.saved._pack import pack_under

        return pack_under(Block([self]), tensor.detach())


def push_hooks() -> None:
    """Let torch ask us about every tensor that it saves from now on, in this thread."""
    from sternway.saved._pack import pack, unpack

    try:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    except RuntimeError as error:  # forbidden, by us or by torch
        raise SavedError(str(error)) from None


def active() -> Block:
    """What is active in this thread."""
    return _active.block


class Hooks(Policy):
    """A user's own pair of hooks, as a policy; what ``pack_hook`` makes of a tensor goes on to the other policies."""

    def __init__(self, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.pack_hook, self.unpack_hook = pack_hook, unpack_hook


class Keep(Policy):
    """Leaves tensors as autograd has them."""


def keep(where: str | Iterable[str] | None = None, *, model: nn.Module | None = None) -> Keep:
    """Except modules from the policies around this block, or inside it: what they save stays as it is.

    Example:
        >>> from sternway import saved
        >>> with saved.compress("int8"), saved.keep(where="head"):
        ...     ...
        Ellipsis

    Args:
        where: patterns for modules' names; everything, unless given.
        model: whose names they are; the outermost module that is called, unless given.
    """
    return Keep(where, model=model)
