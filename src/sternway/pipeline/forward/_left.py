"""What one forward leaves in attributes of modules, and the next one uses: a memory, a cache, a state.

A stage runs only its part of the forward, so another stage that looks at such an attribute finds what was there before.
Attributes are read without anyone noticing. So when a forward has left values, it is run once more, and it is noted
which segments use them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from sternway._torch.tensors import version_of
from sternway._tree import leaves

_OF_TORCH = frozenset(vars(nn.Module()))


class HeldTensor(NamedTuple):
    """A tensor that a module has as a plain attribute, or in a list or dict there."""

    name: str
    tensor: Tensor
    version: int


class LeftValue(NamedTuple):
    """What a forward has left: the name of the attribute, the tensor, and the segment that made it."""

    name: str
    tensor: Tensor
    segment: int


def held_tensors(model: nn.Module) -> dict[int, HeldTensor]:
    """The tensors in plain attributes of a model's modules, by id."""
    found: dict[int, HeldTensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                for leaf in leaves(value):
                    if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference():
                        found[id(leaf)] = HeldTensor(f"{path}.{name}" if path else name, leaf, version_of(leaf))
    return found
