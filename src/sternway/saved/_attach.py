"""A policy that is active whenever a model runs its forward, for training loops that belong to somebody else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from sternway.saved._report import Report

if TYPE_CHECKING:
    from sternway.saved._policy import Policy


class Attached:
    """A policy on a model; ``remove()``, or the end of a ``with`` block, takes it off again.

    Attributes:
        report: that of the last forward; None before the first.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.report: Report | None = None
        self._policy, self._open = policy, 0
        self._handles = (
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),  # also after an error
        )

    def _enter(self, *_: Any) -> None:
        self.report = self._policy.__enter__()
        self._open += 1

    def _leave(self, _model: nn.Module, _arguments: Any, output: Any) -> None:
        if self._open:  # not if an earlier hook failed, before the block began
            self._open -= 1
            failed = output is None and sys.exc_info()[0] is not None
            self._policy.__exit__(*(sys.exc_info() if failed else (None, None, None)))

    def remove(self) -> None:
        """Take the policy off the model. What was saved before is still brought back."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
