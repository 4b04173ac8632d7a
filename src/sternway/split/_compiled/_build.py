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
    graph, parameters = module.graph, source.parameters.keys()
    split_masked(graph)
    outputs: list[Any] = list(output_of(module).args[0])  # type: ignore[arg-type]
    waiting = {slot for slot in weight_slots(module, parameters) if _can_wait(outputs[slot])}
    grads = {slot: outputs[slot] for slot in waiting}
    others = {slot: node for slot, node in enumerate(outputs) if isinstance(node, Node) and slot not in waiting}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    place = {node: index for index, node in enumerate(placeholders)}
    free = {node for node in placeholders if _place(node) in parameters or node.name in source.views}

    cut = halve(graph, list(grads.values()), list(others.values()), free)
    early = {slot: node for slot, node in grads.items() if node in cut.early}
    late = {slot: node for slot, node in grads.items() if node not in cut.early}
    computed = [node for node in cut.held if node.op != "placeholder"]
    i_outputs = list(dict.fromkeys([*others.values(), *early.values(), *computed]))
    late_parts = [factors(graph, node) or (node,) for node in late.values()]
    w_outputs = [node for part in late_parts for node in part]

    also = effects(graph)
    i_needs = between([*i_outputs, *also], set())
    i_inputs = [node for node in placeholders if node in i_needs]
    w_inputs = [*(node for node in cut.held if node.op == "placeholder"), *computed]
    fixed = all(isinstance(size, int) for node in computed for size in getattr(node.meta.get("val"), "shape", ()))
    strided = len(set(others.values())) if fixed else len(i_outputs)  # sizes that vary are not to be compared
    i_module = extract(module, i_inputs, i_outputs, "I", effects=also, strided=range(strided))
    w_module = extract(module, w_inputs, w_outputs, "W")
    whole_w = extract(module, w_inputs, list(late.values()), "W")
    report = _report(source.forward, i_module, whole_w, free, tangents_of(graph), early.values(), len(late))

    i, strides = compile_i(Half(i_module, [examples[place[n]] for n in i_inputs], [place[n] for n in i_inputs]))
    at = {node: index for index, node in enumerate(i_outputs)}
    w = None
    if late:
        w_examples = [
            examples[place[n]] if n in place else _strided(n.meta["val"], strides[at[n]] if strides and fixed else None)
            for n in w_inputs
        ]
        w = compile_w(Half(w_module, w_examples, [place.get(n) for n in w_inputs]))
    own = _own({**early, **late}, others)
    wiring = Wiring(
        i_takes=tuple(place[n] for n in i_inputs),
        w_takes=tuple(place[n] for n in w_inputs if n in place),
        w_holds=tuple(at[n] for n in computed),
        from_i=tuple((slot, at[n]) for slot, n in others.items()),
        early=tuple((slot, at[n]) for slot, n in early.items()),
        late=tuple((slot, len(part) == 2) for slot, part in zip(late, late_parts, strict=True)),
        own=tuple(slot in own for slot in (*early, *late)),
        likes=tuple(_like(n) for n in (*early.values(), *late.values())),
        slots=len(outputs),
        parameter=next((place[n] for n in placeholders if _place(n) in parameters), None),
    )
    halves = Halves(i, w, wiring, report)
    for parameter in source.parameters.values():
        halves.see(parameter)
    KNOWN.add(halves)
    return halves.boxed()


def tangents_of(graph: Graph) -> set[Node]:
    """The gradients that come from outside, among a joint or backward graph's placeholders."""
    return {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")}


def _report(
    forward: CompiledGraph,
    i_module: GraphModule,
    w_module: GraphModule,
    free: set[Node],
    tangents: set[Node],
    early: Collection[Node],
    late: int,
) -> CompiledGraphs:
    i, w = describe(i_module, "I"), describe(w_module, "W")
    parameters, arriving = {node.name for node in free}, {node.name for node in tangents}
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
        + sum(nbytes(node.meta["val"]) for node in dict.fromkeys(early)),
        held_after_f=sum(saved.values()),
        early=len(early),
        late=late,
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
