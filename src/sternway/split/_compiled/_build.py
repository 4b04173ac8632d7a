"""From a backward graph to its two halves, each compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.nn import Parameter

from sternway.split._compiled._block import Boxed
from sternway.split._compiled._cut import halve, split_masked
from sternway.split._compiled._extract import between, extract
from sternway.split._compiled._halves import Halves
from sternway.split._compiled._inspect import KNOWN
from sternway.split._compiled._ops import base, effects, nbytes
from sternway.split._compiled._products import factors
from sternway.split._compiled._report import CompiledGraph, CompiledGraphs, describe
from sternway.split._compiled._wiring import Like, Wiring


@dataclass(frozen=True, slots=True)
class Half:
    """I or W as a graph, to be compiled."""

    module: GraphModule
    inputs: list[Any]  # an example of each input
    places: list[int | None]  # of each input, its place among the backward's arguments; None for what I computed


Compile = Callable[[Half], Boxed]
Strides = list[tuple[int, ...] | None]


def forbid_donation() -> None:
    """Inductor may overwrite what the forward saved; here a value that I has done with may still wait for W."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def weight_slots(module: GraphModule, parameters: Collection[int]) -> set[int]:
    """Which of a backward graph's outputs are gradients of parameters, given the parameters' places in the inputs."""
    slots = set()
    for slot, what in enumerate(output_of(module).meta.get("desc", ())):
        source = getattr(what, "grad_of", None)
        if getattr(source, "idx", None) in parameters:
            slots.add(slot)
    return slots


def output_of(module: GraphModule) -> Node:
    node: Node = next(iter(reversed(module.graph.nodes)))
    return node


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a region before its backward is cut."""

    parameters: dict[int, Parameter]  # by place among the region's inputs
    forward: CompiledGraph
    views: frozenset[str]  # the forward's nodes that only show a parameter's memory

    @classmethod
    def of(cls, forward: GraphModule, parameters: dict[int, Parameter]) -> Source:
        """To be called before the forward is compiled, which changes its graph."""
        views = {node.name for node in forward.graph.nodes if _place(base(node)) in parameters}
        return cls(parameters, describe(forward, "F"), frozenset(views))


def _place(node: Node) -> int | None:
    """A placeholder's place among the region's inputs."""
    return getattr(node.meta.get("desc"), "idx", None) if node.op == "placeholder" else None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which values of a backward graph belong to which half."""

    places: dict[Node, int]  # of the backward's arguments
    free: set[Node]  # arguments that are parameters, or show their memory
    slots: int  # how many outputs the backward has
    others: dict[int, Node]  # by slot, outputs that are no parameter's gradient
    early: dict[int, Node]  # parameters' gradients that I computes
    late: dict[int, Node]  # those that W does, each
    late_parts: list[tuple[Node, ...]]  # as it is, or as the factors of a product
    computed: list[Node]  # what I computes for W
    i_inputs: list[Node]
    w_inputs: list[Node]

    @property
    def i_outputs(self) -> list[Node]:
        return list(dict.fromkeys([*self.others.values(), *self.early.values(), *self.computed]))

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether what I hands to W has sizes that are known; others are not to be compared."""
        return all(isinstance(n, int) for node in self.computed for n in getattr(node.meta.get("val"), "shape", ()))


def _lay_out(module: GraphModule, source: Source) -> _Layout:
    """Cut a backward graph in two."""
    graph, parameters = module.graph, source.parameters.keys()
    split_masked(graph)
    outputs: list[Any] = list(output_of(module).args[0])  # type: ignore[arg-type]
    waiting = {slot for slot in weight_slots(module, parameters) if _can_wait(outputs[slot])}
    grads = {slot: outputs[slot] for slot in waiting}
    others = {slot: node for slot, node in enumerate(outputs) if isinstance(node, Node) and slot not in waiting}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    free = {node for node in placeholders if _place(node) in parameters or node.name in source.views}
    cut = halve(graph, list(grads.values()), list(others.values()), free)
    early = {slot: node for slot, node in grads.items() if node in cut.early}
    late = {slot: node for slot, node in grads.items() if node not in cut.early}
    computed = [node for node in cut.held if node.op != "placeholder"]
    i_needs = between([*others.values(), *early.values(), *computed, *effects(graph)], set())
    return _Layout(
        places={node: index for index, node in enumerate(placeholders)},
        free=free,
        slots=len(outputs),
        others=others,
        early=early,
        late=late,
        late_parts=[factors(graph, node) or (node,) for node in late.values()],
        computed=computed,
        i_inputs=[node for node in placeholders if node in i_needs],
        w_inputs=[*(node for node in cut.held if node.op == "placeholder"), *computed],
    )


def build(
    module: GraphModule,
    examples: Sequence[Any],
    source: Source,
    compile_i: Callable[[Half], tuple[Boxed, Strides]],
    compile_w: Compile,
) -> Boxed:
    """Cut a backward graph, compile its halves, and join them.

    Args:
        module: the backward graph; it is changed.
        examples: an example of each of its arguments.
        source: the forward, and which inputs of the region are parameters.
        compile_i: compiles I, and says which strides its outputs have, as far as they differ from the graph's.
        compile_w: compiles W.
    """
    layout = _lay_out(module, source)
    places, i_inputs, w_inputs, i_outputs = layout.places, layout.i_inputs, layout.w_inputs, layout.i_outputs
    also, fixed = effects(module.graph), layout.has_fixed_sizes
    strided = len(set(layout.others.values())) if fixed else len(i_outputs)
    i_module = extract(module, i_inputs, i_outputs, "I", effects=also, strided=range(strided))
    w_module = extract(module, w_inputs, [node for part in layout.late_parts for node in part], "W")
    whole_w = extract(module, w_inputs, list(layout.late.values()), "W")
    report = _report(source.forward, i_module, whole_w, layout, tangents_of(module.graph))

    i, strides = compile_i(Half(i_module, [examples[places[n]] for n in i_inputs], [places[n] for n in i_inputs]))
    w = None
    if layout.late:
        at = {node: strides[index] if strides and fixed else None for index, node in enumerate(i_outputs)}
        w_examples = [examples[places[n]] if n in places else _strided(n.meta["val"], at[n]) for n in w_inputs]
        w = compile_w(Half(w_module, w_examples, [places.get(n) for n in w_inputs]))
    halves = Halves(i, w, _wire(layout, source.parameters.keys()), report)
    for parameter in source.parameters.values():
        halves.see(parameter)
    KNOWN.add(halves)
    return halves.boxed()


def _wire(layout: _Layout, parameters: Collection[int]) -> Wiring:
    """Where the halves take their inputs from, and where their outputs go."""
    places, early, late = layout.places, layout.early, layout.late
    at = {node: index for index, node in enumerate(layout.i_outputs)}
    own = _own({**early, **late}, layout.others)
    return Wiring(
        i_takes=tuple(places[n] for n in layout.i_inputs),
        w_takes=tuple(places[n] for n in layout.w_inputs if n in places),
        w_holds=tuple(at[n] for n in layout.computed),
        from_i=tuple((slot, at[n]) for slot, n in layout.others.items()),
        early=tuple((slot, at[n]) for slot, n in early.items()),
        late=tuple((slot, len(part) == 2) for slot, part in zip(late, layout.late_parts, strict=True)),
        own=tuple(slot in own for slot in (*early, *late)),
        likes=tuple(_like(n) for n in (*early.values(), *late.values())),
        slots=layout.slots,
        parameter=next((place for n, place in places.items() if _place(n) in parameters), None),
    )


def tangents_of(graph: Graph) -> set[Node]:
    """The gradients that come from outside, among a joint or backward graph's placeholders."""
    return {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")}


def _report(
    forward: CompiledGraph, i_module: GraphModule, w_module: GraphModule, layout: _Layout, tangents: set[Node]
) -> CompiledGraphs:
    i, w = describe(i_module, "I"), describe(w_module, "W")
    parameters, arriving = {node.name for node in layout.free}, {node.name for node in tangents}
    inside = {step.name for step in i.steps if step.op != "input"} | arriving
    takes = [{s.name: s.nbytes for s in g.steps if s.op == "input" and s.name not in parameters} for g in (i, w)]
    saved = {name: size for take in takes for name, size in take.items() if name not in inside}
    return CompiledGraphs(
        F=forward,
        I=i,
        W=w,
        f_to_i=sum(size for name, size in takes[0].items() if name in saved),
        f_to_w=sum(size for name, size in takes[1].items() if name in saved),
        i_to_w=sum(size for name, size in takes[1].items() if name in inside)
        + sum(nbytes(node.meta["val"]) for node in dict.fromkeys(layout.early.values())),
        held_after_f=sum(saved.values()),
        early=len(layout.early),
        late=len(layout.late),
    )


def _can_wait(node: Any) -> bool:
    """Whether there is a gradient, of a shape known beforehand, as a parameter's is."""
    return isinstance(node, Node) and all(isinstance(size, int) for size in node.meta["val"].shape)


def _like(node: Node) -> Like:
    value = node.meta["val"]
    return Like(tuple(value.shape), value.dtype, value.device)


def _own(grads: dict[int, Node], others: dict[int, Node]) -> set[int]:
    """Slots whose gradient is nobody else's memory: not an argument's, an input gradient's or another weight's."""
    taken = {base(node) for node in others.values()}
    own = set()
    for slot, node in grads.items():
        root = base(node)
        if root.op == "call_function" and root not in taken:
            own.add(slot)
        taken.add(root)
    return own


def _strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """An example with the strides that the compiled I gives it."""
    return value if strides is None or value.stride() == strides else value.as_strided(value.size(), strides)
