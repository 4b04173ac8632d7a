"""Which results of a block are kept if it is recomputed selectively: those that are expensive to compute.

Products, convolutions and attention are; torch counts their operations (``torch.utils.flop_counter``), and those of
kernels for which a formula was registered there. Norms, activations, casts, dropout and sums are computed again.

What draws random numbers is never kept. If it were, the second run would draw fewer than the first, and whatever draws
next would get other numbers.
"""

from __future__ import annotations

from typing import Any

from sternway._torch.memory import counts_operations, dropout_of


def is_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the result of a call of an operator is kept: what ``saved.recompute`` asks."""
    return counts_operations(operator) and dropout_of(operator, args, kwargs) == 0
