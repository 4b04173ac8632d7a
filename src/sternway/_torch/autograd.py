"""Tensors, the autograd engine and its graph tasks, storages.

Attributes are read by ``attrgetter``, which costs no Python frame: some are read for every node of a graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sternway._torch.probe import probe

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor's memory was changed in place."""

tensor_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""What ``register_hook`` put on a tensor: a dictionary that torch calls in order, or None."""

accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""What ``register_post_accumulate_grad_hook`` put on a leaf."""

gradient_slots: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""Of a node, what each gradient that arrives at it is like: ``shape``, ``dtype``, ``device``."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a differentiable view shows."""


is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd follows the tensor as a view of another."""

storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Which storage this is; another one has another number while this one lives."""


def storage_id(tensor: Tensor) -> int:
    """Which storage a tensor has; another storage has another number while this one lives."""
    return tensor.untyped_storage()._cdata


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and graphs hold a tensor's storage."""
    return int(torch._C._storage_Use_Count(storage_id(tensor)))


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def accumulate_grad() -> type:
    """The type of the node at which a leaf's gradient arrives."""
    functions: Any = torch._C._functions
    return functions.AccumulateGrad


def current_graph_task() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Whether a gradient will arrive at a node in the backward that runs."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # The engine refuses to answer for a leaf whose gradient autograd.grad was asked for: one will arrive.
        if "autograd.grad" in str(error):
            return True
        raise


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs in this thread is over; it is dropped if that fails."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def sequence_number(node: Any) -> int:
    """The place of a node in the order in which its thread made nodes."""
    return int(node._sequence_nr())


def hook_gradient_edge(edge: GradientEdge, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Run ``hook`` with the gradient (None if undefined) whenever one arrives at an edge whose tensor may be gone.

    It is a tensor hook, not a hook of the node: the engine skips those where ``autograd.grad`` takes the gradient out
    before the node runs. Of the tensor the engine uses only the dictionary of hooks and which output of its node it is.
    So one of several outputs of an ``unbind`` takes its place.
    """
    with torch.enable_grad():
        stand_in = torch.zeros(edge.output_nr + 1, requires_grad=True).unbind()[edge.output_nr]
    hooks: OrderedDict[int, Callable[[Tensor | None], None]] = OrderedDict()
    stand_in._backward_hooks = hooks  # type: ignore[assignment]  # an undefined gradient comes as None
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    edge.node._register_hook_dict(stand_in)
    return handle


def without_torch_function() -> AbstractContextManager[Any]:
    """A block in which subclasses of Tensor are not asked."""
    return torch._C.DisableTorchFunction()


def without_autocast() -> AbstractContextManager[Any]:
    """A block in which nothing is cast, as compiled code was compiled."""
    return torch._C._DisableAutocast()


def add_each(totals: list[Tensor], values: list[Tensor]) -> None:
    """``total += value`` for each pair, in few kernels."""
    torch._foreach_add_(totals, values)


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """``tensor *= factor`` for each, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def conjugate_view(tensor: Tensor) -> Tensor:
    """A view that is read as the conjugate; nothing is computed."""
    return torch._conj(tensor)


def negative_view(tensor: Tensor) -> Tensor:
    """A view that is read as the negative; nothing is computed."""
    return torch._neg_view(tensor)


def lazy_copy(tensor: Tensor) -> Tensor:
    """A copy that shares memory until one of the two is written."""
    return torch._lazy_clone(tensor)


@probe("Tensor._version", expected="counts in-place changes", features=("split", "saved", "hooks", "graph"))
def _version() -> bool:
    tensor = torch.zeros(1)
    before = version_of(tensor)
    return version_of(tensor.add_(1)) == before + 1 == version_of(tensor.detach())


@probe(
    "Tensor._backward_hooks",
    expected="holds a tensor's hooks by key, and calls what is put in their place",
    features=("split", "hooks", "graph"),
)
def _tensor_hooks() -> bool:
    called: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    before = tensor_hooks(leaf)
    leaf.register_hook(lambda grad: called.append("own"))
    hooks = tensor_hooks(leaf) or {}
    hooks.update(dict.fromkeys(list(hooks), lambda grad: called.append("put there")))
    leaf.sum().backward()
    return before is None and called == ["put there"]


@probe(
    "Tensor._post_accumulate_grad_hooks",
    expected="holds the hooks of register_post_accumulate_grad_hook",
    features=("split", "graph"),
)
def _accumulate_hooks() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    before = accumulate_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    return before is None and len(accumulate_hooks(leaf) or ()) == 1


@probe(
    "Node._input_metadata",
    expected="says the shape and dtype of each gradient that arrives at a node",
    features=("split", "hooks", "graph"),
)
def _gradient_slots() -> bool:
    (one,) = gradient_slots(torch.ones(2, 3, dtype=torch.float64, requires_grad=True).exp().grad_fn)
    return tuple(one.shape) == (2, 3) and one.dtype is torch.float64 and one.device == torch.device("cpu")


@probe("Tensor._base, Tensor._is_view", expected="lead from a view to what it shows", features=("split", "saved"))
def _views() -> bool:
    tensor = torch.ones(2)
    view = tensor[:1]
    return is_view(view) and base_of(view) is tensor and not is_view(tensor) and base_of(tensor) is None


@probe(
    "UntypedStorage._cdata, torch._C._storage_Use_Count",
    expected="tell storages apart and count who holds one",
    features=("saved", "graph", "pipeline"),
)
def _storages() -> bool:
    tensor = torch.ones(2)
    before = storage_uses(tensor)
    view = tensor[:1]
    return storage_id(view) == storage_id(tensor) != storage_id(torch.ones(2)) and storage_uses(tensor) == before + 1


@probe("Tensor._indices, Tensor._values", expected="are the parts of a COO tensor", features=("split", "graph"))
def _sparse() -> bool:
    indices, values = sparse_parts(torch.tensor([0.0, 2.0, 3.0]).to_sparse())
    return indices.tolist() == [[1, 2]] and values.tolist() == [2.0, 3.0]


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
    features=("hooks", "state"),
)
def _graph_task() -> bool:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    middle, beside = x.exp(), y.exp()
    below: Any = middle.grad_fn
    nodes = [below, below.next_functions[0][0], beside.grad_fn]
    seen: list[Any] = []
    top = middle * beside
    top.register_hook(lambda grad: seen.extend([current_graph_task(), *map(will_execute, nodes)]))
    torch.autograd.grad(top.sum(), [x])
    return current_graph_task() == -1 and seen[0] >= 0 and seen[1:] == [True, True, False]


@probe(
    "Node._register_hook_dict, Node._sequence_nr",
    expected="run a tensor hook at an edge, and tell the order of nodes",
    features=("hooks",),
)
def _edge_hooks() -> bool:
    x = torch.ones(4, requires_grad=True)
    first, second = (2 * x).split(2)
    edge = get_gradient_edge(second)
    arrived: list[Any] = []
    hook_gradient_edge(edge, arrived.append)
    later = (second * second).sum()
    torch.autograd.grad(later, [second], retain_graph=True)  # takes the gradient out there
    torch.autograd.grad(first.sum(), [x])
    seen = [None if grad is None else grad.tolist() for grad in arrived]
    return seen == [[4.0, 4.0], None] and sequence_number(later.grad_fn) > sequence_number(edge.node)


@probe(
    "torch.autograd.Variable._execution_engine.queue_callback",
    expected="calls a function at the end of a backward, and drops it if that fails",
    features=("hooks",),
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


@probe("torch._C.DisableTorchFunction", expected="keeps subclasses from being asked", features=("graph",))
def _torch_function() -> bool:
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError("asked")

    tensor = torch.ones(1).as_subclass(Refusing)
    with without_torch_function():
        return tensor.add(1).shape == (1,)


@probe("torch._C._DisableAutocast", expected="switches autocast off for a block", features=("split.compiled",))
def _autocast() -> bool:
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast():
        return (matrix @ matrix).dtype is torch.float32


@probe(
    "torch._foreach_add_, torch._foreach_mul_",
    expected="change each tensor of a list in place",
    features=("split", "pipeline"),
)
def _foreach() -> bool:
    totals = [torch.ones(1), torch.ones(2)]
    add_each(totals, [torch.ones(1), torch.ones(2)])
    scale_each(totals, torch.tensor(3.0))
    return [total.tolist() for total in totals] == [[6.0], [6.0, 6.0]]


@probe("torch._conj, torch._neg_view", expected="are views, with the bit set", features=("saved",))
def _lazy_views() -> bool:
    tensor = torch.tensor([1 + 2j])
    conjugate, negative = conjugate_view(tensor), negative_view(tensor)
    return (
        conjugate.is_conj()
        and negative.is_neg()
        and storage_id(conjugate) == storage_id(tensor) == storage_id(negative)
        and conjugate.tolist() == [1 - 2j]
        and negative.tolist() == [-1 - 2j]
    )


@probe("torch._lazy_clone", expected="copies no later than when one of the two is written", features=("state",))
def _lazy_clone() -> bool:
    tensor = torch.ones(2)
    copy = lazy_copy(tensor)
    copy.add_(1)
    return tensor.tolist() == [1.0, 1.0] and copy.tolist() == [2.0, 2.0]
