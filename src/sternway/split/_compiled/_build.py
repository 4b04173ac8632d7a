"""From a backward graph to its two halves, each compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from sternway.split._compiled._cut import halve, split_masked
from sternway.split._compiled._extract import between, extract
from sternway.split._compiled._halves import Boxed, Halves, Like, Wiring
from sternway.split._compiled._ops import base, effects


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


def weight_slots(module: GraphModule, parameters: frozenset[int]) -> set[int]:
    """Which of a backward graph's outputs are gradients of parameters, given the parameters' places in the inputs."""
    slots = set()
    for slot, what in enumerate(output_of(module).meta.get("desc", ())):
        source = getattr(what, "grad_of", None)
        if getattr(source, "idx", None) in parameters:
            slots.add(slot)
    return slots


def output_of(module: GraphModule) -> Node:
    return next(iter(reversed(module.graph.nodes)))


def build(
    module: GraphModule,
    examples: Sequence[Any],
    parameters: frozenset[int],
    compile_i: Callable[[Half], tuple[Boxed, Strides]],
    compile_w: Compile,
) -> tuple[Halves, GraphModule, GraphModule | None]:
    """Cut a backward graph, compile its halves, and join them.

    Args:
        module: the backward graph; it is changed.
        examples: an example of each of its arguments.
        parameters: which inputs of the whole are parameters.
        compile_i: compiles I, and says which strides its outputs have, as far as they differ from the graph's.
        compile_w: compiles W.

    Returns:
        The halves joined, and both graphs; W is None if no gradient waits.
    """
    graph = module.graph
    split_masked(graph)
    outputs: list[Any] = list(output_of(module).args[0])  # type: ignore[arg-type]
    waiting = {slot for slot in weight_slots(module, parameters) if _can_wait(outputs[slot])}
    grads = {slot: outputs[slot] for slot in waiting}
    others = {slot: node for slot, node in enumerate(outputs) if isinstance(node, Node) and slot not in waiting}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    place = {node: index for index, node in enumerate(placeholders)}
    free = {node for node in placeholders if getattr(node.meta.get("desc"), "idx", None) in parameters}

    cut = halve(graph, list(grads.values()), list(others.values()), free)
    computed = [node for node in cut.held if node.op != "placeholder"]
    i_outputs = list(dict.fromkeys([*others.values(), *(grads[s] for s in grads if grads[s] in cut.early), *computed]))
    late = {slot: node for slot, node in grads.items() if node not in cut.early}
    w_outputs = list(dict.fromkeys(late.values()))

    also = effects(graph)
    i_needs = between([*i_outputs, *also], set())
    i_inputs = [node for node in placeholders if node in i_needs]
    w_inputs = [*(node for node in cut.held if node.op == "placeholder"), *computed]
    i_module = extract(module, i_inputs, i_outputs, also, "I")
    w_module = extract(module, w_inputs, w_outputs, (), "W") if late else None

    i, strides = compile_i(Half(i_module, [examples[place[n]] for n in i_inputs], [place[n] for n in i_inputs]))
    w = None
    at = {node: index for index, node in enumerate(i_outputs)}
    if w_module is not None:
        w_examples = [
            examples[place[n]] if n in place else _strided(n.meta["val"], strides[at[n]] if strides else None)
            for n in w_inputs
        ]
        w = compile_w(Half(w_module, w_examples, [place.get(n) for n in w_inputs]))
    wiring = Wiring(
        i_takes=tuple(place[n] for n in i_inputs),
        w_takes=tuple(place[n] for n in w_inputs if n in place),
        w_holds=tuple(at[n] for n in computed),
        from_i=tuple((slot, at[n]) for slot, n in others.items()),
        early=tuple((slot, at[n]) for slot, n in grads.items() if n in cut.early),
        late=tuple((slot, w_outputs.index(n)) for slot, n in late.items()),
        own=_own(grads, others),
        likes=tuple(_like(n) for n in (*(n for n in grads.values() if n in cut.early), *late.values())),
        slots=len(outputs),
    )
    return Halves(i, w, wiring), i_module, w_module


def _can_wait(node: Any) -> bool:
    """Whether there is a gradient, of a shape known beforehand, as a parameter's is."""
    return isinstance(node, Node) and all(isinstance(size, int) for size in node.meta["val"].shape)


def _like(node: Node) -> Like:
    value = node.meta["val"]
    return Like(tuple(value.shape), value.dtype, value.device)


def _own(grads: dict[int, Node], others: dict[int, Node]) -> frozenset[int]:
    """Slots whose gradient is nobody else's memory: not an argument's, an input gradient's or another weight's."""
    taken = {base(node) for node in others.values()}
    own = set()
    for slot, node in grads.items():
        root = base(node)
        if root.op == "call_function" and root not in taken:
            own.add(slot)
        taken.add(root)
    return frozenset(own)


def _strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """An example with the strides that the compiled I gives it."""
    return value if strides is None or value.stride() == strides else value.as_strided(value.size(), strides)
