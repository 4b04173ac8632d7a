"""A compiled region whose F, I and W are CUDA graphs: ``mode="reduce-overhead"``.

Inductor's own graphs keep the memory of one call, and a split has several in flight. So Inductor compiles without, and
what it made is captured as ``split.capture`` captures a module: a set of graphs for each call in flight. Dynamo passes
parameters and buffers as arguments, and calls the same code for other layers of the same form; there is a capture for
each that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from sternway._storage import storage_sizes
from sternway._torch.captures import is_preparing
from sternway._tree import leaves
from sternway.split.captured._capture import Captured
from sternway.split.captured._look import Uncapturable


class CompiledLayer(nn.Module):
    """A compiled region, with some of its arguments for good.

    Args:
        call: the region; it takes tensors and numbers.
        arguments: of one call.
        fixed: which of them are parameters and buffers.
        others: which are not.
    """

    is_compiled = True

    def __init__(
        self, call: Callable[..., Any], arguments: Sequence[Any], fixed: Sequence[int], others: Sequence[int]
    ) -> None:
        super().__init__()
        self._call, self._others = call, others
        self._names = {index: f"input{index}" for index in fixed}
        for index, name in self._names.items():
            value = arguments[index]
            register = self.register_parameter if isinstance(value, nn.Parameter) else self.register_buffer
            register(name, value)

    def forward(self, *others: Any) -> Any:
        """Call the region with the arguments that are not fixed."""
        given = dict(zip(self._others, others, strict=True))
        given.update({index: getattr(self, name) for index, name in self._names.items()})
        arguments = [given[index] for index in range(len(given))]
        result = self._call(*arguments)
        if is_preparing():
            _refuse_views(result, arguments)
        return result


def _refuse_views(result: Any, arguments: Sequence[Any]) -> None:
    """Graphs return copies; whoever writes to a view would not see it elsewhere."""
    made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
    given = storage_sizes(leaf for leaf in arguments if isinstance(leaf, Tensor))
    if not storage_sizes(made).keys().isdisjoint(given):
        raise Uncapturable("the region returns one of its inputs, or a view of it")
    for one, other in combinations(made, 2):
        if one is not other and not storage_sizes([one]).keys().isdisjoint(storage_sizes([other])):
            raise Uncapturable("the region returns two views of the same memory")


def replayed(call: Callable[..., Any], fixed: Sequence[int], count: int) -> Callable[..., Any]:
    """Call a compiled region as CUDA graphs, where it can be.

    Args:
        call: the region.
        fixed: which of its arguments are parameters and buffers.
        count: how many arguments it has.
    """
    others = [index for index in range(count) if index not in set(fixed)]
    layers: dict[tuple[int, ...], Captured] = {}  # by the ids of what is fixed, which each holds

    def region(*arguments: Any) -> Any:
        key = tuple([id(arguments[index]) for index in fixed])
        captured = layers.get(key)
        if captured is None:
            layer = CompiledLayer(call, arguments, fixed, others)
            captured = layers[key] = Captured(layer, in_flight=1, grows=True)
        return captured(*[arguments[index] for index in others])

    return region
