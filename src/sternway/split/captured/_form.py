"""What a call must have in common with the one that was captured, for a replay to do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway._tree import CONSTANT, leaves, take_tensors

_CONSTANT = (*CONSTANT, complex, bytes, torch.dtype, torch.device, torch.Size, slice, type(...))

TensorForm = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


@dataclass(frozen=True, slots=True)
class CallForm:
    """All of a call but the contents of its tensors.

    Attributes:
        tree: the arguments and keyword arguments, with a ``TensorIndex`` for each tensor.
        kinds: the types of its leaves: 1 and True are equal, and may compute other things.
        tensors: of each, shape, strides, dtype and whether it needs a gradient.
        modes: of each module, whether it trains.
        settings: whether autocast is on, its dtype, and how exact products and other operations must be.
    """

    tree: Any
    kinds: tuple[type, ...]
    tensors: tuple[TensorForm, ...]
    modes: tuple[bool, ...]
    settings: tuple[Any, ...]

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], modules: list[nn.Module]
    ) -> tuple[CallForm, list[Tensor]]:
        """The form of a call, and its tensors."""
        tree, tensors = take_tensors((args, kwargs))
        form = cls(
            tree,
            tuple(type(leaf) for leaf in leaves(tree)),
            tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors),
            tuple([module.training for module in modules]),
            (
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cuda"),
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
            ),
        )
        return form, tensors

    def varying(self) -> str | None:
        """The type of an argument that may change unnoticed, if there is one: neither a tensor nor a constant."""
        for leaf in leaves(self.tree):
            if getattr(leaf, "varies", not isinstance(leaf, _CONSTANT)):
                return type(leaf).__name__
        return None

    def is_same(self, other: CallForm) -> bool:
        """Whether a graph of one is one of the other. What cannot be compared is another."""
        try:
            return bool(self == other)
        except Exception:
            return False
