"""Dynamo, functionalization and Inductor: what our operators do while torch.compile traces and lowers them.

These names are used inside of torch's compiler, where a probe cannot run. So each use also checks, and raises
``UnsupportedTorch``: nothing is left out in silence.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager
from functools import cache
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule

from sternway._torch.probe import probe
from sternway.errors import UnsupportedTorch


def _unsupported(name: str, expected: str, error: Exception) -> NoReturn:
    raise UnsupportedTorch(
        f"{name} must do what compiled code with a BackwardState needs: it {expected}",
        got=f"{type(error).__name__}: {error} with torch {torch.__version__}",
        fix="use a release of torch that `sternway doctor` passes, or run without torch.compile",
    ) from error


# Dynamo


def graph_being_traced() -> Any:
    """Dynamo's record of the graph that it traces in this thread; None outside of a trace."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    if module is None:
        return None
    try:
        current = module.InstructionTranslator.current_tx
    except AttributeError as error:
        _unsupported("InstructionTranslator.current_tx", "gives the trace of this thread", error)
    try:
        return current().output
    except AttributeError:
        return None  # no trace in this thread


def traced_code(graph: Any) -> CodeType:
    """The code of the function that Dynamo began to trace."""
    try:
        code: CodeType = graph.root_tx.f_code
    except AttributeError as error:
        _unsupported("OutputGraph.root_tx.f_code", "is the code that is traced", error)
    return code


def static_inputs(module: GraphModule) -> list[int]:
    """Which inputs of one of Dynamo's graphs are parameters, buffers and other tensors that modules hold."""
    notes = [node.meta.get("tensor_dict") or {} for node in module.graph.nodes if node.op == "placeholder"]
    return [index for index, note in enumerate(notes) if note.get("_dynamo_static_input_type")]


def carry_functions(graph: Any, local: str) -> int:
    """Tell Dynamo that the functions in a list of the frame that it traces are no constants; returns how many.

    A function that is made in the trace has to be made again after the graph has run. Dynamo first asks whether it is a
    constant, for which it looks at everything that the function closes over, and guards on what it finds: a list that
    the function appends to would mean a recompilation in every step.
    """
    try:
        from torch._dynamo.variables.functions import FunctoolsPartialVariable, NestedUserFunctionVariable

        known = graph.current_tx.symbolic_locals
        left = list(known[local].items) if local in known else []  # a backend compiles: the frame is done
        contents = graph.side_effects.store_attr_mutations
    except (ImportError, AttributeError) as error:
        _unsupported("Dynamo's symbolic_locals and function variables", "show the functions of a frame", error)
    seen: list[Any] = []
    carried = 0
    while left:
        made = left.pop()
        kind = type(made)  # and not isinstance, which makes Dynamo look, and guard
        if any(made is one for one in seen) or not issubclass(
            kind, FunctoolsPartialVariable | NestedUserFunctionVariable
        ):
            continue
        seen.append(made)
        if made.source is None:
            try:
                made.__class__ = _carried(kind)
            except TypeError as error:
                _unsupported(f"Dynamo's {kind.__name__}", "can be told to be no constant", error)
            carried += 1
        left.append(getattr(made, "func", None))  # of a partial
        closure = getattr(made, "closure", None)
        for cell in [] if closure is None else closure.items:  # other functions that were made in the trace
            left.append(contents.get(cell, {}).get("cell_contents"))
    return carried


@cache
def _carried(kind: type) -> type:
    known = kind.__name__ == "_Carried"
    return kind if known else type("_Carried", (kind,), {"is_python_constant": lambda self: False})


# Functionalization


def without_functionalization() -> AbstractContextManager[Any]:
    """A block in which operators skip functionalization."""
    key: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(key)
    return guard


def from_functional(tensor: Tensor) -> Tensor:
    """The tensor inside of a functional one, after the changes that were made to it."""
    torch._functionalize_sync(tensor)
    return torch._from_functional_tensor(tensor)


def to_functional(tensor: Tensor) -> Tensor:
    """A functional tensor around a tensor."""
    return torch._to_functional_tensor(tensor)


# Inductor


def forbid_cuda_graphs(reason: str) -> None:
    """If Inductor is lowering a graph in this thread, make it use no CUDA graph for it."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return
    try:
        graph = virtualized.V.graph
        if isinstance(graph, virtualized.NullHandler):
            return  # no graph is being lowered
        graph.disable_cudagraphs_reason  # noqa: B018 - setting another name would do nothing
        graph.disable_cudagraphs_reason = reason
    except AttributeError as error:
        _unsupported("torch._inductor.virtualized.V.graph.disable_cudagraphs_reason", "forbids a CUDA graph", error)


@probe(
    "torch._dynamo.symbolic_convert.InstructionTranslator, NestedUserFunctionVariable",
    expected="show the graph and the functions of the frame that is traced",
    features=("state.compiled",),
)
def _dynamo() -> bool:
    seen: list[Any] = []
    library: Any = torch.library.Library("sternway_probe", "FRAGMENT")
    library.define("look(Tensor x) -> Tensor")
    library.impl("look", lambda x: x.clone(), "CompositeExplicitAutograd")

    def look(x: Tensor) -> Tensor:
        graph = graph_being_traced()
        if graph is not None:
            seen.extend([traced_code(graph), carry_functions(graph, "fns")])
        return torch.empty_like(x)

    torch.library.register_fake("sternway_probe::look", look, lib=library)

    def traced(x: Tensor, kept: list[int]) -> Any:
        fns = [lambda: kept]
        return torch.ops.sternway_probe.look(x), fns

    traced.__code__ = traced.__code__.replace()  # Dynamo counts compilations by code, and the probe may run often
    kept: list[int] = []
    compiled: Any = torch.compile(traced, backend="eager", fullgraph=True)
    out, fns = compiled(torch.ones(1), kept)
    library._destroy()
    return seen == [traced.__code__, 1] and fns[0]() is kept and out.tolist() == [1.0] and graph_being_traced() is None


@probe(
    'node.meta["tensor_dict"]["_dynamo_static_input_type"]',
    expected="tells parameters and buffers from other inputs of Dynamo's graphs",
    features=("split.compiled",),
)
def _static() -> bool:
    from torch._dynamo import mark_static_address
    from torch._dynamo.variables import builder

    held: Any = torch.ones(1)
    mark_static_address(held, guard=False)
    return held._dynamo_static_input_type == "unguarded" and '"tensor_dict"' in inspect.getsource(builder)


@probe(
    "torch._to_functional_tensor, torch._from_functional_tensor, torch._functionalize_sync, "
    "torch._C._ExcludeDispatchKeyGuard",
    expected="wrap a tensor for functionalization, and lead past it",
    features=("state.compiled",),
)
def _functionalization() -> bool:
    tensor = torch.ones(2)
    wrapped = to_functional(tensor)
    with without_functionalization():
        plain = from_functional(wrapped)
        doubled = (2 * plain).tolist()
    return wrapped is not tensor and plain.data_ptr() == tensor.data_ptr() and doubled == [2.0, 2.0]


@probe(
    "torch._inductor.virtualized.V.graph.disable_cudagraphs_reason",
    expected="keeps Inductor from making a CUDA graph",
    features=("state.compiled",),
)
def _cuda_graphs() -> bool:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    forbid_cuda_graphs("outside of a graph")  # does nothing
    empty = torch.fx.GraphModule({}, torch.fx.Graph())
    empty.graph.output(())
    graph = GraphLowering(empty)
    before = graph.disable_cudagraphs_reason
    with V.set_graph_handler(graph):
        forbid_cuda_graphs("a reason")
    return before is None and graph.disable_cudagraphs_reason == "a reason"
