"""What one forward leaves in attributes of modules, and the next one uses: a memory, a cache, a state.

A stage runs only its part of the forward, so another stage that looks at such an attribute finds what was there before.
Attributes are read without anyone noticing. So when a forward has left values, it is run once more, and it is noted
which segments use them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sternway._torch.tensors import version_of

_DEPTH = 3  # of containers that are looked into
_OF_TORCH = frozenset(vars(nn.Module()))


class HeldTensor(NamedTuple):
    """A tensor that a module has as a plain attribute, or in a container there."""

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
                for tensor in _tensors(value, _DEPTH):
                    if not isinstance(tensor, nn.Parameter) and not tensor.is_inference():
                        found[id(tensor)] = HeldTensor(f"{path}.{name}" if path else name, tensor, version_of(tensor))
    return found


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in an attribute, and in containers there. These may be anybody's, and hold themselves."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict | deque):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth - 1)
