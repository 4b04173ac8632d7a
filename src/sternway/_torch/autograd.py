"""The autograd engine: its graph tasks, and what its nodes say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import has_torch_function

from sternway._torch.probe import probe

gradient_slots: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""Of a node, what each gradient that arrives at it is like: ``shape``, ``dtype``, ``device``."""


def accumulate_grad() -> type:
    """The type of the node at which a leaf's gradient arrives."""
    functions: Any = torch._C._functions
    return functions.AccumulateGrad


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor is in the graph, as ``torch.autograd.graph.get_gradient_edge``, for any tensor.

    torch finds a leaf's node through ``view_as``. A sparse or nested tensor has no such view, and a subclass may put
    nodes of its own between.
    """
    if tensor.grad_fn is None and torch.is_inference_mode_enabled():  # a view that is made there has no node
        with torch.inference_mode(False):
            return edge_of(tensor)
    if tensor.grad_fn is not None or (type(tensor) is Tensor and _has_view(tensor)):
        return get_gradient_edge(tensor)
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        probed = tensor.view_as(tensor) if _has_view(tensor) else tensor.clone()
        function: Any = probed.grad_fn
    return GradientEdge(function.next_functions[0][0], 0)


def _has_view(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def gradients_at(
    edges: Sequence[GradientEdge], outputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad(outputs, edges, grads, allow_unused=True)``, without a look at each edge.

    torch looks at each because it could be a tensor of a subclass. Each gradient must have its output's shape. An
    output may be an edge, too.
    """
    for output, grad in zip(outputs, grads, strict=True):
        if grad is None or not _is_usual(output, grad.dtype):
            return torch.autograd.grad(outputs, edges, grads, allow_unused=True)
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)  # nothing but time is lost without it
    if run is None or has_torch_function(outputs):  # a function mode
        return torch.autograd.grad(outputs, edges, grads, allow_unused=True)
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs), tuple(grads), False, False, tuple(edges), allow_unreachable=True, accumulate_grad=False
    )
    return found


def _is_usual(output: Any, dtype: torch.dtype) -> bool:
    """Whether a gradient of this dtype is an output's as it is."""
    if type(output) is GradientEdge:
        slot = gradient_slots(output.node)[output.output_nr]
        return slot.dtype is dtype and not slot.is_nested_tensor
    return type(output) is Tensor and output.dtype is dtype and not output.is_nested


def newest_sequence_number() -> int:
    """The number of the newest node that this thread has made."""
    return torch._C._autograd._get_sequence_nr() - 1


def in_forward_mode() -> bool:
    """Whether tangents are computed, as in ``torch.autograd.forward_ad.dual_level()``."""
    return torch.autograd.forward_ad._current_level >= 0


def current_graph_task() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Whether a gradient will arrive at a node in the backward that runs."""
    return arrival_at(node) != "none"


def arrival_at(node: Any) -> Literal["none", "runs", "asked"]:
    """What the backward that runs does with a node's gradient: nothing, run the node, or return it: ``autograd.grad``.

    The engine refuses to answer for a leaf whose gradient ``autograd.grad`` was asked for.
    """
    try:
        return "runs" if torch._C._will_engine_execute_node(node) else "none"
    except RuntimeError as error:
        if "autograd.grad" in str(error):
            return "asked"
        raise


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs in this thread is over; it is dropped if that fails."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The place of a node in the order in which its thread made nodes; a leaf's node has the largest number there is."""


@probe(
    "Node._input_metadata",
    expected="says the shape, dtype and device of each gradient that arrives at a node, and whether it is nested",
    features=("split", "hooks", "graph"),
)
def _gradient_slots() -> bool:
    (one,) = gradient_slots(torch.ones(2, 3, dtype=torch.float64, requires_grad=True).exp().grad_fn)
    looks = tuple(one.shape), one.dtype, one.device, one.is_nested_tensor
    return looks == ((2, 3), torch.float64, torch.device("cpu"), False)


@probe(
    "torch.autograd.graph._engine_run_backward",
    expected="gives the gradients at edges, from tensors and edges, and None where there is none",
    features=("split",),
)
def _gradients_at() -> bool:
    x, y = torch.full((1,), 3.0, requires_grad=True), torch.ones(1, requires_grad=True)
    below, grad = x * x, torch.full((1,), 2.0)
    roots = [below.exp().log(), edge_of(below.exp().log())]
    found = gradients_at([edge_of(x), edge_of(below), edge_of(y)], roots, [grad, grad])
    return [each if each is None else round(each.item()) for each in found] == [24, 4, None] and x.grad is None


@probe(
    "torch._C._functions.AccumulateGrad",
    expected="is the type of a leaf's node, which has the leaf as `variable`",
    features=("split", "graph"),
)
def _accumulate_grad() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    function: Any = leaf.exp().grad_fn
    node: Any = function.next_functions[0][0]
    return node.variable is leaf and isinstance(node, accumulate_grad())


@probe(
    "torch._C._current_graph_task_id, torch._C._will_engine_execute_node",
    expected="tell which backward runs and where it will come to",
    features=("hooks", "state", "split", "split.capture"),
    hooks=1,
)
def _graph_task() -> bool:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    middle, beside = x.exp(), y.exp()
    below: Any = middle.grad_fn
    nodes = [below, below.next_functions[0][0], beside.grad_fn]
    seen: list[Any] = []
    top = middle * beside
    top.register_hook(lambda grad: seen.extend([current_graph_task(), *map(will_execute, nodes), arrival_at(nodes[1])]))
    torch.autograd.grad(top.sum(), [x])
    answers = [True, True, False, "asked"]
    return current_graph_task() == -1 and seen[0] >= 0 and seen[1:] == answers


@probe(
    "torch.autograd.Variable._execution_engine.queue_callback",
    expected="calls a function at the end of a backward, and drops it if that fails",
    features=("hooks",),
    hooks=4,
)
def _end_of_backward() -> bool:
    x = torch.ones(1, requires_grad=True)
    called: list[str] = []

    def backward(fail: bool) -> None:
        y = 2 * x
        y.register_hook(lambda grad: at_end_of_backward(lambda: called.append("end")))
        x_hook = x.register_hook(lambda grad: 1 / 0 if fail else called.append("hook"))
        try:
            y.sum().backward()
        except ZeroDivisionError:
            called.append("failed")
        finally:
            x_hook.remove()

    backward(fail=True)
    backward(fail=False)
    return called == ["failed", "hook", "end"]


@probe(
    "get_gradient_edge and Node.next_functions of a leaf",
    expected="lead to the AccumulateGrad node of sparse leaves and subclasses",
    features=("split", "hooks"),
)
def _edges() -> bool:
    class Named(Tensor):
        pass

    plain = torch.ones(2)
    leaves = [plain.clone(), plain.to_sparse(), plain.clone().as_subclass(Named)]
    edges = [edge_of(leaf.requires_grad_()) for leaf in leaves]
    with torch.inference_mode():
        edges, leaves = [*edges, *map(edge_of, leaves)], [*leaves, *leaves]
    return all(edge.node.variable is leaf for edge, leaf in zip(edges, leaves, strict=True))  # type: ignore[attr-defined]


@probe(
    "Node._sequence_nr, torch._C._autograd._get_sequence_nr",
    expected="grow with every node that a thread makes",
    features=("split",),
)
def _sequence() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    first: Any = leaf.exp().grad_fn
    newest = newest_sequence_number()
    second: Any = leaf.exp().grad_fn
    return sequence_number(first) == newest < sequence_number(second)
