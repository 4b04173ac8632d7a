"""AOTAutograd: its graphs and its partitioners.

Nothing of it is imported with this module: that takes seconds, and only compiled code needs it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from sternway._torch.dtensors import LOCAL
from sternway._torch.probe import probe
from sternway.errors import UnsupportedTorch

COMPILED_NODE = "CompiledFunctionBackward"
"""The type name of the autograd node of a compiled graph."""

OpOverload: Any = type(torch.ops.aten.add.Tensor)
"""The type of an operator in a graph."""

original_callable: Callable[[Any], Any] = attrgetter("_torchdynamo_orig_callable")
"""The function that ``torch.compile`` was given, of what it returned. Raises AttributeError for anything else."""

Partition = Callable[..., tuple[GraphModule, GraphModule]]


def backward_is_compiled() -> bool:
    """Whether Dynamo compiles the backwards that run now, which takes no hooks of C++. If it is not imported, none."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def aot_autograd(**options: Any) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """AOTAutograd with the compilers and the partitioner in ``options``, as a Dynamo backend. Nothing is cached.

    Its cache of whole functions knows of a forward and a backward only, not of three graphs.
    """
    from torch._dynamo.backends.common import aot_autograd as made_by

    compiler = made_by(**options)

    def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with without_cache():
            return compiler(module, inputs)

    return compile_graph


def without_cache() -> AbstractContextManager[Any]:
    """A block in which AOTAutograd caches nothing."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes a single list and empties it, as AOTAutograd and Inductor call theirs."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def split_joint(
    joint: GraphModule, inputs: Any, *, least_memory: bool, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward of a joint graph, by torch's own partitioners.

    Args:
        joint: AOTAutograd's graph of both.
        inputs: examples of its inputs.
        least_memory: compute again in the backward what is cheap; otherwise save all that the backward needs.
        options: as AOTAutograd passes them.
    """
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    if least_memory:
        return min_cut_rematerialization_partition(joint, inputs, **options)
    options.pop("compiler", None)
    return default_partition(joint, inputs, **options)


def input_index(node: Node) -> int | None:
    """Of a placeholder, the index of the region's input that it is; None for any other node.

    Of a DTensor, the part that a process holds is an input of the graph.
    """
    described = _whole(node.meta.get("desc")) if node.op == "placeholder" else None
    return None if hasattr(described, "base") else getattr(described, "idx", None)  # others are sizes of a subclass


def gradient_indices(module: GraphModule) -> list[int | None]:
    """For each output of a joint or backward graph, the index of the region's input whose gradient it is, or None."""
    described = output_node(module).meta.get("desc", ())
    return [getattr(getattr(_whole(what), "grad_of", None), "idx", None) for what in described]


def _whole(described: Any) -> Any:
    """What describes a DTensor, given what describes the part that a process holds; anything else as it is."""
    return described.base if getattr(described, "attr", None) == LOCAL else described


def overwritten_inputs(joint: GraphModule) -> set[Node]:
    """The inputs of a joint graph that its forward changes in place, at its end or after it."""
    described = output_node(joint).meta.get("desc", ())
    after = {getattr(getattr(what, "mutated_input", None), "idx", None) for what in described} - {None}
    written = {node.args[0] for node in joint.graph.nodes if node.target is torch.ops.aten.copy_.default}
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    return {node for node in inputs if node in written or input_index(node) in after}


def output_node(module: GraphModule) -> Node:
    """The node that returns a graph's results."""
    return next(iter(reversed(module.graph.nodes)))


def tangents(graph: Graph) -> set[Node]:
    """The placeholders of a joint or backward graph that are gradients of the region's outputs."""
    return {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")}


def keep_strides(output: Node, indices: Sequence[int]) -> None:
    """Make Inductor keep the graph's strides for these results; of others it may choose them."""
    output.meta["user_visible_output_idxs"] = list(indices)


def example_value(node: Node) -> Any:
    """What the node computes, as fake tensors and symbolic numbers."""
    return node.meta.get("val")


def size_hint(number: int | SymInt) -> int:
    """A size as a number: if it varies, what it was when the graph was made."""
    if isinstance(number, SymInt):
        known = number.node.hint
        return 4096 if known is None else int(known)
    return int(number)


def shows_argument(op: Any) -> bool:
    """Whether an operator's result is a view of an argument."""
    aliases = [argument.alias_info for argument in op._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def forbid_donation() -> None:
    """Keep Inductor from overwriting saved tensors in the backward that is being compiled.

    Raises:
        UnsupportedTorch: this torch does not say in ``bw_donated_idxs`` what may be overwritten.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:  # outside of AOTAutograd nothing is donated
        return
    if not hasattr(metadata, "bw_donated_idxs"):
        raise UnsupportedTorch(
            "AOTAutograd's metadata must say in bw_donated_idxs which saved tensors the backward may overwrite",
            got=f"a {type(metadata).__name__} without it, in torch {torch.__version__}",
            fix='use a release of torch that `sternway doctor` passes, or torch.compile with backend="inductor"',
        )
    metadata.bw_donated_idxs = []


class _TracedRegion:
    """A tiny region through AOTAutograd, uncompiled: what our wrappers say of its graphs."""

    def __init__(self) -> None:
        from torch._functorch import config
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode

        def region(x: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor]:
            count.add_(1)
            return ((x @ weight).sin(),)

        x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
        count = torch.zeros(())

        def compile_forward(graph: GraphModule, examples: Any) -> Any:
            return boxed(lambda arguments: graph(*arguments))

        def compile_backward(graph: GraphModule, examples: Any) -> Any:
            self.backward = gradient_indices(graph)
            self.tangents = len(tangents(graph.graph))
            self.placeholders = [input_index(node) for node in graph.graph.nodes if node.op == "placeholder"]
            metadata: Any = context.fw_metadata
            self.donated = [metadata.bw_donated_idxs]
            forbid_donation()
            self.donated.append(metadata.bw_donated_idxs)
            return boxed(lambda arguments: graph(*arguments))

        def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            self.joint = gradient_indices(joint)
            self.overwritten = [input_index(node) for node in overwritten_inputs(joint)]
            self.values = [example_value(node) for node in joint.graph.nodes if node.op != "output"]
            split_joint(joint, inputs, least_memory=True, **options)
            return split_joint(joint, inputs, least_memory=False, **options)

        compiler = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward, partition_fn=partition)
        context = TracingContext(FakeTensorMode())
        with tracing(context), config.patch(donated_buffer=True):
            compiled = compiler(torch.fx.symbolic_trace(region), [x, weight, count])
        (output,) = compiled(x, weight, count)
        self.node: Any = output.grad_fn
        (self.grad,) = torch.autograd.grad(output.sum(), [weight])


_traced = cache(_TracedRegion)


def traced_node() -> Any:
    """The node of a tiny compiled graph, for probes."""
    return _traced().node


@probe(
    "torch._dynamo.backends.common.aot_autograd, torch._functorch.partitioners",
    expected="make a forward and a backward graph with our compilers and partitioner",
    features=("split.compiled",),
)
def _aot() -> bool:
    grad = torch.full((3, 4), 2 * torch.tensor(3.0).cos().item())
    return torch.allclose(_traced().grad, grad) and all(isinstance(value, Tensor) for value in _traced().values)


@probe(COMPILED_NODE, expected="is the autograd node of a compiled graph", features=("split.compiled",))
def _node() -> bool:
    return type(traced_node()).__name__ == COMPILED_NODE


@probe(
    "node.meta['desc']: GradAOTOutput.grad_of, AOTInput.idx",
    expected="name the input whose gradient an output of a backward graph is",
    features=("split.compiled",),
)
def _descriptions() -> bool:
    return _traced().backward[:2] == [0, 1] and [each for each in _traced().joint if each is not None] == [0, 1]


@probe(
    "node.meta['desc']: InputMutationAOTOutput.mutated_input; aten.copy_ in a joint graph",
    expected="name the inputs that a forward overwrites",
    features=("split.compiled",),
)
def _overwritten() -> bool:
    return _traced().overwritten == [2]


@probe(
    "tangents_1, …",
    expected="are the names of the incoming gradients in a backward graph",
    features=("split.compiled",),
)
def _tangents() -> bool:
    return _traced().tangents == 1


@probe(
    "ViewAndMutationMeta.bw_donated_idxs, TracingContext.fw_metadata",
    expected="say which saved tensors Inductor may overwrite in a backward",
    features=("split.compiled",),
)
def _donation() -> bool:
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._guards import TracingContext, tracing
    from torch._inductor.utils import get_donated_idxs

    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1])  # type: ignore[assignment]
    with tracing(context):
        before = get_donated_idxs()
        forbid_donation()
        after = get_donated_idxs()
    field = "bw_donated_idxs" in {field.name for field in dataclasses.fields(ViewAndMutationMeta)}
    return field and before == [1] and after == [] and _traced().donated[1] == [] != _traced().donated[0]


@probe("OpOverload._schema, SymInt.node.hint", expected="describe operators and sizes", features=("split.compiled",))
def _operators() -> bool:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(torch.exp, tracing_mode="symbolic")(torch.ones(3, 2)).graph
    (size, *_) = next(example_value(node).shape for node in graph.nodes if node.op == "placeholder")
    aten: Any = torch.ops.aten
    views = [shows_argument(op) for op in (aten.view.default, aten.add.Tensor, aten.add_.Tensor)]
    return views == [True, False, False] and isinstance(size, SymInt) and size_hint(size) == 3


@probe(
    "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
    expected="tells whether backwards are compiled",
    features=("split.native",),
)
def _compiled_backwards() -> bool:
    # Looked at as code: to import it takes seconds.
    source = (Path(torch.__file__).parent / "_dynamo/compiled_autograd.py").read_text()
    return "\ncompiled_autograd_enabled = False\n" in source and "global compiled_autograd_enabled" in source


@probe(
    "_torchdynamo_orig_callable",
    expected="is the function that torch.compile was given",
    features=("split.compiled",),
)
def _original() -> bool:
    def function(x: Tensor) -> Tensor:
        return x

    return original_callable(torch.compile(function, backend="eager")) is function
