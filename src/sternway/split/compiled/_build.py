"""From a backward graph to its two halves, each compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.nn import Parameter

from sternway._torch.compile import example_value, gradient_indices, input_index, output_node, tangents
from sternway._torch.dtensors import is_dtensor
from sternway.split.compiled._cut import halve, split_masked
from sternway.split.compiled._extract import between, extract
from sternway.split.compiled._halves import GradientSpec, Halves, Wiring
from sternway.split.compiled._inspect import KNOWN
from sternway.split.compiled._ops import base, effects, is_number, nbytes
from sternway.split.compiled._products import factors
from sternway.split.compiled._report import CompiledGraph, CompiledGraphs, describe
from sternway.split.compiled._work import Boxed


@dataclass(frozen=True, slots=True)
class Half:
    """I or W as a graph, to be compiled."""

    module: GraphModule
    inputs: list[Any]  # an example of each input
    places: list[int | None]  # of each input, its index among the backward's arguments; None for what I computed


Compile = Callable[[Half], Boxed]
Strides = list[tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a module that is compiled as one, as known before its backward is."""

    parameters: dict[int, Parameter]  # by index among the region's inputs
    forward: CompiledGraph
    views: frozenset[str]  # the forward's nodes that are views of a parameter

    @classmethod
    def of(cls, forward: GraphModule, parameters: dict[int, Parameter]) -> Region:
        """Call this before the forward is compiled, which changes its graph."""
        views = {node.name for node in forward.graph.nodes if input_index(base(node)) in parameters}
        return cls(parameters, describe(forward, "F"), frozenset(views))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which values of a backward graph belong to which half. A slot is an index among the backward's results."""

    places: dict[Node, int]  # the backward's arguments, by node
    free: set[Node]  # arguments that are parameters, or views of them
    slots: int  # how many results the backward has
    others: dict[int, Node]  # by slot, results that are no parameter's gradient
    early: dict[int, Node]  # parameters' gradients that I computes
    late: dict[int, Node]  # those that W computes; each is
    late_parts: list[tuple[Node, ...]]  # one node, or the two factors of a product
    sharded: set[Node]  # gradients of which AOTAutograd makes DTensors, of the strides that the graph has
    computed: list[Node]  # what I computes for W
    i_inputs: list[Node]
    w_inputs: list[Node]

    @property
    def i_outputs(self) -> list[Node]:
        return list(dict.fromkeys([*self.others.values(), *self.early.values(), *self.computed]))

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether the sizes of what I computes for W are numbers; symbols cannot be compared."""
        return all(isinstance(n, int) for node in self.computed for n in getattr(example_value(node), "shape", ()))


def _lay_out(module: GraphModule, region: Region) -> _Layout:
    """Cut a backward graph in two."""
    graph, parameters = module.graph, region.parameters
    split_masked(graph)
    outputs: list[Any] = list(output_node(module).args[0])  # type: ignore[arg-type]
    weights = {slot: i for slot, i in enumerate(gradient_indices(module)) if i is not None and i in parameters}
    grads = {slot: outputs[slot] for slot, index in weights.items() if _can_wait(outputs[slot], parameters[index])}
    sharded = {grad for slot, grad in grads.items() if is_dtensor(parameters[weights[slot]])}
    others = {slot: node for slot, node in enumerate(outputs) if isinstance(node, Node) and slot not in grads}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    numbers = [node for node in placeholders if is_number(node)]  # for both: what the sizes of their inputs are made of
    free = {node for node in placeholders if input_index(node) in parameters or node.name in region.views}
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
        late_parts=[(None if node in sharded else factors(graph, node)) or (node,) for node in late.values()],
        sharded=sharded,
        computed=computed,
        i_inputs=[node for node in placeholders if node in i_needs or node in numbers],
        w_inputs=list(dict.fromkeys([*numbers, *(node for node in cut.held if node.op == "placeholder"), *computed])),
    )


def build(
    module: GraphModule,
    examples: Sequence[Any],
    region: Region,
    compile_i: Callable[[Half], tuple[Boxed, Strides]],
    compile_w: Compile,
) -> Boxed:
    """Cut a backward graph, compile its halves, and join them.

    Args:
        module: the backward graph; it is changed.
        examples: an example of each of its arguments.
        region: the forward, and which inputs of the region are parameters.
        compile_i: compiles I, and returns the strides of its results where they differ from the graph's.
        compile_w: compiles W.
    """
    layout = _lay_out(module, region)
    places, i_inputs, w_inputs, i_outputs = layout.places, layout.i_inputs, layout.w_inputs, layout.i_outputs
    also, fixed = effects(module.graph), layout.has_fixed_sizes
    strided = {*layout.others.values(), *layout.sharded} if fixed else set(i_outputs)
    i_module = extract(module, i_inputs, i_outputs, "I", effects=also, strided=strided)
    w_outputs = [node for part in layout.late_parts for node in part]
    w_module = extract(module, w_inputs, w_outputs, "W", strided=layout.sharded)
    whole_w = extract(module, w_inputs, list(layout.late.values()), "W")
    report = _report(region.forward, i_module, whole_w, layout, tangents(module.graph))

    i, strides = compile_i(Half(i_module, [examples[places[n]] for n in i_inputs], [places[n] for n in i_inputs]))
    w = None
    if layout.late:
        at = {node: strides[index] if strides and fixed else None for index, node in enumerate(i_outputs)}
        w_examples = [examples[places[n]] if n in places else _strided(example_value(n), at[n]) for n in w_inputs]
        w = compile_w(Half(w_module, w_examples, [places.get(n) for n in w_inputs]))
    halves = Halves(i, w, _wire(layout, region.parameters), report)
    for parameter in region.parameters.values():
        halves.see(parameter)
    KNOWN.add(halves)
    return halves.boxed()


def _wire(layout: _Layout, parameters: dict[int, Parameter]) -> Wiring:
    """Where the halves take their inputs from, and where their results go."""
    places, early, late = layout.places, layout.early, layout.late
    at = {node: index for index, node in enumerate(layout.i_outputs)}
    owned = _owned({**early, **late}, layout.others)
    plain = {index for index, parameter in parameters.items() if not is_dtensor(parameter)}
    return Wiring(
        i_takes=tuple(places[n] for n in layout.i_inputs),
        w_takes=tuple(places[n] for n in layout.w_inputs if n in places),
        w_holds=tuple(at[n] for n in layout.computed),
        from_i=tuple((slot, at[n]) for slot, n in layout.others.items()),
        early=tuple((slot, at[n]) for slot, n in early.items()),
        late=tuple(late),
        is_product=tuple(len(part) == 2 for part in layout.late_parts),
        owned=tuple(slot in owned for slot in (*early, *late)),
        specs=tuple(_spec(n) for n in (*early.values(), *late.values())),
        slots=layout.slots,
        parameter=next((place for n, place in places.items() if input_index(n) in plain), None),
    )


def _report(
    forward: CompiledGraph, i_module: GraphModule, w_module: GraphModule, layout: _Layout, incoming: set[Node]
) -> CompiledGraphs:
    i, w = describe(i_module, "I"), describe(w_module, "W")
    parameters, arriving = {node.name for node in layout.free}, {node.name for node in incoming}
    inside = {each.name for each in i.nodes if each.op != "input"} | arriving
    takes = [{n.name: n.nbytes for n in g.nodes if n.op == "input" and n.name not in parameters} for g in (i, w)]
    saved = {name: size for take in takes for name, size in take.items() if name not in inside}
    return CompiledGraphs(
        F=forward,
        I=i,
        W=w,
        f_to_i=sum(size for name, size in takes[0].items() if name in saved),
        f_to_w=sum(size for name, size in takes[1].items() if name in saved),
        i_to_w=sum(size for name, size in takes[1].items() if name in inside)
        + sum(nbytes(example_value(node)) for node in dict.fromkeys(layout.early.values())),
        held_after_f=sum(saved.values()),
        early=len(layout.early),
        late=len(layout.late),
    )


def _can_wait(node: Any, parameter: Parameter) -> bool:
    """Whether there is a gradient, of a shape without symbols, as a parameter's is; and a mark can stand for it.

    Of subclasses that AOTAutograd takes apart, it can for DTensors: a part of another would not be known again.
    """
    if hasattr(parameter, "__tensor_flatten__") and not is_dtensor(parameter):
        return False
    return isinstance(node, Node) and all(isinstance(size, int) for size in example_value(node).shape)


def _spec(node: Node) -> GradientSpec:
    value = example_value(node)
    return GradientSpec(tuple(value.shape), value.dtype, value.device)


def _owned(grads: dict[int, Node], others: dict[int, Node]) -> set[int]:
    """Slots whose gradient shares memory with no argument, no other result and no other weight gradient."""
    taken = {base(node) for node in others.values()}
    owned = set()
    for slot, node in grads.items():
        root = base(node)
        if root.op == "call_function" and root not in taken:
            owned.add(slot)
        taken.add(root)
    return owned


def _strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """An example with the strides that the compiled I gives it."""
    return value if strides is None or value.stride() == strides else value.as_strided(value.size(), strides)
