"""W of an eager graph: parts that go straight into a parameter, and parts that go through the graph first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence, Set
from functools import reduce
from itertools import chain
from typing import final

import torch
from torch import Tensor

from sternway._storage import storage_sizes
from sternway._torch.autograd import sequence_number
from sternway._torch.nodes import TO_COPY
from sternway._torch.tensors import is_zero_tensor, storage_id, version_of
from sternway.saved import Policy
from sternway.split._accumulate import Accumulator, EngineCall
from sternway.split._behind import held_behind
from sternway.split._later import Product
from sternway.split._part import Cut, Node, Part, changed_in_i, sum_to


class _Parts(ABC):
    """Deferred work that is made of parts."""

    @abstractmethod
    def parts(self) -> Iterable[Part]: ...

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts() for tensor in part.tensors()]

    def pack(self, policy: Policy) -> None:
        for part in self.parts():
            part.pack(policy)

    def check(self) -> None:
        for part in self.parts():
            part.check()

    def keep_apart(self, written: Set[int]) -> None:
        for part in self.parts():
            part.keep_apart(written)


@final
class DirectWork(_Parts):
    """Parts that go straight into a parameter, by its leaf."""

    def __init__(self, parts: dict[Node, list[Part]], late: Sequence[Node], early: Sequence[Node]) -> None:
        self._parts = parts
        self.late = late
        self.early = early

    def parts(self) -> Iterable[Part]:
        return chain(*self._parts.values())

    def run(self, accumulator: Accumulator) -> None:
        while self._parts:
            leaf, parts = self._parts.popitem()
            if accumulator.exact and len(parts) > 1:
                parts = [_sum(leaf, parts)]
            parameter = accumulator.writable(leaf)
            if parameter is None:
                accumulator.queue(leaf, parts)
                continue
            for part in parts:
                if part.is_packed:
                    part.unpack()
                _add(accumulator, parameter, part)
        accumulator.flush()


@final
class GraphWork(_Parts):
    """Parts that the engine takes through the rest of the graph, such as a slice or ``W + A @ B``."""

    early: Sequence[Node] = ()

    def __init__(self, calls: list[EngineCall]) -> None:
        self._calls = calls
        self.late = [leaf for call in calls for leaf in call.leaves]

    def parts(self) -> Iterable[Part]:
        return chain(*(call.parts for call in self._calls))

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *held_behind(list(self.parts()))]

    def run(self, accumulator: Accumulator) -> None:
        for call in self._calls:
            accumulator.queue_call(call)


def deferred_work(
    cuts: Iterable[Cut],
    ready: Sequence[tuple[Node, Tensor]],
    branches: Iterable[tuple[Part, Tensor]] = (),
    computed: Container[Part] = (),
) -> tuple[DirectWork, GraphWork, list[Part]]:
    """What W has to do after I: for the cuts, for leaves whose gradient is computed, and for branches.

    The gradients of the parts in ``computed`` are computed too, though they come from cuts. Beside the work, the parts
    of cuts at which no gradient arrived.
    """
    direct: dict[Node, list[Part]] = {}
    calls: list[EngineCall] = []
    missed: list[Part] = []
    for cut in cuts:
        if not cut.grads or (grad := cut.grads.pop()[0]) is None:
            missed += cut.parts
            continue
        version = version_of(grad)
        if cut.versions and cut.versions.pop() != version:
            raise changed_in_i(grad)
        for part in cut.parts:
            part.grad, part.version = grad, version
            leaf = part.leaf
            if leaf is None:
                calls = _join(part, calls)
            elif leaf in direct:
                direct[leaf].append(part)
            else:
                direct[leaf] = [part]
    for part, grad in branches:
        part.grad, part.version = grad, version_of(grad)
        calls = _join(part, calls)
    late, early = list(direct), [leaf for leaf, _ in ready]
    if computed:
        early += [leaf for leaf, parts in direct.items() if all(part in computed for part in parts)]
        late = [leaf for leaf in late if leaf not in early]
    for leaf, grad in ready:
        part = Part.of_leaf(leaf, grad)
        if leaf in direct:
            direct[leaf].append(part)
        else:
            direct[leaf] = [part]
    for call in calls:
        for leaf in call.leaves:
            call.parts += direct.pop(leaf, ())
    return DirectWork(direct, late, early), GraphWork(calls), missed


def in_order(cuts: Iterable[Cut]) -> list[Cut]:
    """The cuts in the order in which the engine runs their nodes: the newest first."""
    return sorted(cuts, key=lambda cut: sequence_number(cut.node), reverse=True)


def _join(part: Part, calls: list[EngineCall]) -> list[EngineCall]:
    """The calls, with ``part`` in one together with all that share a parameter with it."""
    joined = EngineCall(dict.fromkeys(part.leaves()), [part])
    apart = []
    for call in calls:
        if joined.leaves.keys().isdisjoint(call.leaves):
            apart.append(call)
        else:
            joined = EngineCall(call.leaves | joined.leaves, call.parts + joined.parts)
    return [*apart, joined]


def _add(accumulator: Accumulator, parameter: Tensor, part: Part) -> None:
    """Give a part to the accumulator: as a product, if it is one."""
    later, transposed = part.later, part.transposed and parameter.ndim > 1
    if isinstance(later, Product):
        left, right = later.factors(part.grad, transposed)
        if accumulator.add_product(parameter, left, right, later.scale):
            return
    value = part.value(transposed)
    if parameter.grad is None and value.shape == parameter.shape and not isinstance(later, Product):
        value = _own(value, part)
    accumulator.add_value(parameter, value)


def _sum(leaf: Node, parts: Iterable[Part]) -> Part:
    """Several parts of a leaf as one, added up as the engine does: first at the node where they meet, then at the leaf.

    Adding them to ``.grad`` one by one could differ in the last bit.
    """
    sums: dict[object, Tensor] = {}
    for part in parts:
        part.unpack()
        transposed = part.transposed and leaf.variable.ndim > 1
        value = sum_to(part.value(transposed), tuple(leaf.variable.shape))
        meeting = _cast_on_the_way(part, leaf) or part.edge[0]
        key = part if meeting is leaf else meeting
        before = sums.pop(key, None)  # the last to arrive decides when the sum goes on
        sums[key] = value if before is None else _plus(before, value)
    values = [value.to(leaf.variable.dtype) for value in sums.values()]
    return Part.of_leaf(leaf, reduce(_plus, values))


def _plus(total: Tensor, value: Tensor) -> Tensor:
    """The sum of two gradients. torch adds a sparse one to a dense one, not the other way round."""
    return total + value if total.layout is torch.strided else value + total


def _cast_on_the_way(part: Part, leaf: Node) -> Node | None:
    """The node of a cast between a part and its leaf; autocast makes one for all uses of a weight."""
    node = part.edge[0]
    while node is not leaf and type(node) is not TO_COPY:
        node = node.next_functions[0][0]
    return None if node is leaf else node


def _own(value: Tensor, part: Part) -> Tensor:
    """The value of a part in memory that nothing else reads."""
    if is_zero_tensor(value):  # zeros that take no memory
        return torch.zeros_like(value)
    if value.layout != torch.strided:  # a sparse gradient has the indices that the forward was given
        return value.clone()
    if storage_id(value) in storage_sizes(part.tensors()):
        return value.clone(memory_format=torch.preserve_format)
    return value
