"""Dispatch modes: a block in which Python sees every operator that torch runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sternway._torch.probe import probe

Operator = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Given an operator, its arguments and its keywords, what the operator returns."""


def each_operator(run: Operator) -> AbstractContextManager[Any]:
    """A block in which ``run`` is called in place of each operator, below autograd.

    Example:
        >>> def show(operator, args, kwargs):
        ...     print(operator)
        ...     return operator(*args, **kwargs)
        >>> with each_operator(show):
        ...     x = torch.zeros(2) + 1
        aten.zeros.default
        aten.add.Tensor
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class EachOperator(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(function, args, kwargs or {})

    return EachOperator()


@probe(
    "torch.utils._python_dispatch.TorchDispatchMode",
    expected="sees each operator once, and what it returns is the result",
    features=("saved",),
)
def _each_operator() -> bool:
    seen: list[str] = []

    def instead(operator: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(operator))
        return operator(*args, **kwargs) + 1

    tensor = torch.zeros(1)
    with each_operator(instead):
        result = tensor.add(1)
    return seen == ["aten.add.Tensor"] and result.tolist() == [2.0]
