"""I and W of an eager graph by the extension in C++, where a user has switched it on and the graph is plain.

The extension plans, reads and runs what takes most calls of Python: matrix products with parameters on one side,
convolutions, and leaves whose gradient I computes. It does so for a whole graph or not at all. Whatever is unusual (a
hook, a custom Function, a branch, a weight made of others) it leaves to the planner, and it leaves to the accumulator
what W may not add to here. Other cuts, such as embeddings, it only finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from sternway._torch import require
from sternway._torch.compile import backward_is_compiled
from sternway._torch.native import ROLES, TERMS
from sternway._torch.nodes import (
    ACCUMULATE_GRAD,
    TO_COPY,
    TRANSPOSE,
    T,
    allow_more_reads,
    packed_by_hooks,
)
from sternway._torch.operands import Addmm, Baddbmm, Bmm, Convolution, Mm
from sternway._torch.parallel import in_process_group
from sternway._torch.tensors import ORDINARY, version_of
from sternway.saved import Policy
from sternway.split._accumulate import Accumulator
from sternway.split._behind import takes_data
from sternway.split._later import Later, Product
from sternway.split._part import Cut, Edge, Node, Part, changed_between, packing_of
from sternway.split._places import edge_of
from sternway.split._plan import SplitPlan
from sternway.split._rules import RULES, Operands
from sternway.split._unsupported import UNSUPPORTED
from sternway.split.eager._known import OWN_RULES, convolution_bias, convolution_weight
from sternway.split.eager._work import DirectWork

_READ_THERE = {
    Mm.name: "mm",
    Bmm.name: "bmm",
    Addmm.name: "addmm",
    Baddbmm.name: "baddbmm",
    Convolution.name: "convolution",
}
_ON_THE_WAY = {ACCUMULATE_GRAD: "leaf", T: "t", TRANSPOSE: "transpose", TO_COPY: "cast"}


class _Extension:
    """The extension, whether it is switched on, and what it was told about kinds of nodes."""

    def __init__(self) -> None:
        self.module: Any = None
        self.is_on = self.was_tried = False
        self._kinds: Any = None
        self._rules: dict[str, Operands] = {}

    def cuts(self) -> Any:
        """Cuts to be made of a graph."""
        if self._rules != RULES:  # a rule was added since
            self._kinds, self._rules = self.module.Kinds(_look, takes_data, ORDINARY), dict(RULES)
        return self.module.Cuts(self._kinds)


EXTENSION = _Extension()
"""What ``accelerate`` switches on."""


def _look(node: Node) -> tuple[int, list[int], list[int], list[int]]:
    """What a kind of node is to the extension, and which of its operands have rules."""
    kind, name = type(node), type(node).__name__
    operands = RULES.get(name)
    if issubclass(kind, BackwardCFunction) or name in UNSUPPORTED:
        role = "unusual"
    elif operands is None:
        role = _ON_THE_WAY.get(kind, "plain")
    else:
        role = _READ_THERE.get(name, "cut") if operands is OWN_RULES.get(name) else "cut"
    found = operands or Operands()
    weights, lefts, biases = ([each.position for each in some] for some in (found.weights, found.lefts, found.biases))
    return ROLES.index(role), weights, lefts, biases


@final
class NativeCuts:
    """The cuts of one graph that the extension has found, and reads."""

    def __init__(self, cuts: Any, holders: Sequence[Sequence[Any]], quiet: bool) -> None:
        self._cuts, self._holders = cuts, holders
        self.asked: list[Node] = cuts.ask(quiet)  # the engine is asked for the gradients there
        self.bottom: list[Node] = cuts.bottom  # of these, those that it does not run
        self._hooks = not quiet

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep what arrives at the cuts as they run in the block, unless the engine is asked for it."""
        if not self._hooks:
            yield
            return
        self._cuts.hook(self._before_reading)
        try:
            yield
        finally:
            self._cuts.release()

    def _before_reading(self, at: int, times: int) -> None:
        for holder in self._holders[at]:
            allow_more_reads(holder, times)

    def finish(self, grads: list[Tensor | None]) -> tuple[NativeWork, list[Node]]:
        """What W has to do, and the leaves that no gradient arrived at, given what the engine was asked for."""
        missed = self._cuts.finish(grads)
        return NativeWork(self._cuts), missed


def native_plan(
    roots: Sequence[Tensor | GradientEdge], inputs: Collection[Edge], exact: bool, own_thread: bool
) -> SplitPlan | None:
    """The plan of a graph for which the extension does; None for any other, or where it is not switched on."""
    if not EXTENSION.is_on or exact or torch.is_anomaly_enabled() or backward_is_compiled():
        return None
    if not all(type(root) is GradientEdge or type(root) in ORDINARY for root in roots):
        return None
    require("split")
    if in_process_group():
        require("split.parallel")
    found, places = EXTENSION.cuts(), list(dict.fromkeys(inputs))
    if not found.make(list(map(edge_of, roots)), places):
        return None
    held = found.packed()
    if not held:  # nothing to read there
        return None
    cuts = [_cut(*each) for each in found.others]
    kinds = {packing_of(packed) for packed in held} | {cut.packing for cut in cuts}
    quiet = "checkpoint" not in kinds
    if not kinds <= {None, "checkpoint"} or not (quiet or inputs):
        return None
    reached = [place for place, there in zip(places, found.reached, strict=True) if there]
    native = NativeCuts(found, held, quiet and own_thread)
    return SplitPlan(cuts, found.leaves(False), reached, [], [], False, [], [], [], quiet, native)


def _cut(node: Node, found: list[tuple[Node, int, Node, bool, int]], runs_in_i: bool) -> Cut:
    """A cut that Python reads."""
    operands = RULES[type(node).__name__]
    functions = {each.position: each.function for each in operands.weights + operands.lefts + operands.biases}
    parts = [
        Part((child, at), leaf, transposed, place, functions[place]) for child, at, leaf, transposed, place in found
    ]
    holders = packed_by_hooks(node)
    return Cut(node, parts, packing_of(holders), runs_in_i, holders)


@final
class NativeWork:
    """Parts that go straight into a parameter, held by the extension."""

    def __init__(self, cuts: Any) -> None:
        self._cuts = cuts
        self._rest = DirectWork({}, (), ())  # what Python must do
        self.late: list[Node] = cuts.leaves(True)
        self.early: list[Node] = cuts.leaves(False)

    def tensors(self) -> list[Tensor]:
        return [*self._cuts.tensors(), *self._rest.tensors()]

    def pack(self, policy: Policy) -> None:
        self.check()
        self._leave_to_python()
        self._rest.pack(policy)

    def _leave_to_python(self) -> None:
        if parts := _parts(self._cuts.take()):
            self._rest = DirectWork(parts, (), ())

    def check(self) -> None:
        if (grad := self._cuts.changed()) is not None:
            raise changed_between(grad)
        self._rest.check()

    def keep_apart(self, written: Set[int]) -> None:
        if self._cuts.reads(written):
            self._leave_to_python()
        self._rest.keep_apart(written)

    def run(self, accumulator: Accumulator) -> None:
        left = self._cuts.take() if accumulator.is_careful else self._cuts.run()
        DirectWork(_parts(left), (), ()).run(accumulator)
        self._rest.run(accumulator)


def _parts(given: list[tuple[Node, list[Any]]]) -> dict[Node, list[Part]]:
    """What the extension gives back, as parts."""
    found: dict[Node, list[Part]] = {}
    for leaf, parts in reversed(given):
        found[leaf] = []
        for child, at, transposed, term, scale, settings, (grad, *kept) in parts:
            part = Part((child, at), leaf, transposed)
            part.grad, part.version = grad, version_of(grad)
            part.later = _later(TERMS[term], scale, settings, kept)
            found[leaf].append(part)
    return found


def _later(term: str, scale: complex, settings: Sequence[Any], kept: Sequence[Tensor]) -> Later | None:
    match term:
        case "of left":
            return Product(right=kept[0], scale=scale)
        case "of right":
            return Product(left=kept[0], scale=scale)
        case "filter":
            return convolution_weight(settings, *kept)
        case "bias":
            return convolution_bias()
    return None
