"""Floating-point operations of matrix products and convolutions, counted as they run."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper


def flops(run: Callable[[], object]) -> int:
    """The floating-point operations in ``run``.

    torch's own counter puts hooks on modules, which a checkpoint that recomputes them does not stand.
    """
    with _Counter() as counter:
        run()
    return counter.total


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        formula = _FORMULAS.get(operator._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _grouped_mm(left: Any, right: Any, *_: Any, **__: Any) -> int:
    stacks = left[0] if len(left) == len(right) == 3 else 1  # otherwise the groups divide a dimension of a matrix
    return 2 * stacks * prod(left[-2:]) * right[-1]


def _trilinear(first: Any, second: Any, third: Any, *settings: Any, **_: Any) -> int:
    shapes = [list(first), list(second), list(third)]
    for shape, expanded in zip(shapes, settings[:3], strict=True):
        for dim in expanded:
            shape.insert(dim, 1)
    return 2 * prod(map(max, *shapes))


_FORMULAS = {  # torch's, and those that it lacks
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
    torch.ops.aten._grouped_mm: shape_wrapper(_grouped_mm),
    torch.ops.aten._trilinear: shape_wrapper(_trilinear),
}
