"""Tensors, the autograd engine and its graph tasks, storages.

Attributes are read by ``attrgetter``, which costs no Python frame: some are read for every node of a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sternway._torch.probe import probe

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor's memory was changed in place."""

accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""What ``register_post_accumulate_grad_hook`` put on a leaf."""

gradient_slots: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""Of a node, what each gradient that arrives at it is like: ``shape``, ``dtype``, ``device``, ``layout``."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a differentiable view shows."""


_ORDINARY = (Tensor, torch.nn.Parameter)


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """What ``register_hook`` put on a tensor: a dictionary that torch calls in order, or None."""
    if type(tensor) in _ORDINARY:
        return tensor._backward_hooks
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse to be read
        return tensor._backward_hooks


def needs_grad(tensor: Tensor) -> bool:
    """``tensor.requires_grad``, of a subclass too that refuses to be read."""
    if type(tensor) in _ORDINARY:
        return tensor.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def layout_enforced() -> bool:
    """Whether a first ``.grad`` must have its parameter's strides: ``torch.autograd.enforce_grad_layout_policy``."""
    asked = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)  # torch 2.13 and later
    return asked is None or asked()


def is_view(tensor: Tensor) -> bool:
    """Whether autograd follows the tensor as a view of another."""
    return tensor._is_view()


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether a tensor stands for zeros without memory, as autograd makes for gradients that are known to be zero."""
    return tensor._is_zerotensor()


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


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor is in the graph, as ``torch.autograd.graph.get_gradient_edge``, for any tensor.

    torch finds a leaf's node through ``view_as``. A sparse tensor has no such view, and a subclass may put nodes of its
    own between.
    """
    if tensor.grad_fn is not None or (type(tensor) is Tensor and tensor.layout is torch.strided):
        return get_gradient_edge(tensor)
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        probed = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
        function: Any = probed.grad_fn
    return GradientEdge(function.next_functions[0][0], 0)


def hooks_registered() -> int:
    """How many hooks Python code has put on tensors, nodes and modules since the process began."""
    return RemovableHandle.next_id


def sequence_number(node: Any) -> int:
    """The order in which a thread made its nodes; a leaf's node has the largest number there is."""
    return node._sequence_nr()


def newest_sequence_number() -> int:
    """The number of a node that this thread makes now."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return sequence_number(torch.empty(0, requires_grad=True).view(0).grad_fn)


PROBING = 2
"""How many registrations ``has_node_hooks`` adds to ``hooks_registered``."""


def has_node_hooks(node: Any) -> bool:
    """Whether Python code has put hooks on a node, by ``register_hook`` or ``register_prehook``.

    A node keeps the hooks of a kind in one dictionary, and a new hook's handle leads to it.
    """
    before, after = node.register_prehook(_nothing), node.register_hook(_nothing)
    found = [len(handle.hooks_dict_ref()) for handle in (before, after)]
    before.remove()
    after.remove()
    return found != [1, 1]


def _nothing(*_: Any) -> None:
    """A hook that is removed before it can run."""


def current_graph_task() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Whether the backward that runs will come to a node."""
    return bool(torch._C._will_engine_execute_node(node))


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
    below, apart = middle.grad_fn, beside.grad_fn
    seen: list[Any] = []
    top = middle * beside
    top.register_hook(lambda grad: seen.extend([current_graph_task(), will_execute(below), will_execute(apart)]))
    torch.autograd.grad(top.sum(), [x])
    return current_graph_task() == -1 and seen[0] >= 0 and seen[1:] == [True, False]


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
    return all(edge.node.variable is leaf for edge, leaf in zip(edges, leaves, strict=True))  # type: ignore[attr-defined]


@probe(
    "RemovableHandle.next_id",
    expected="counts every hook that Python puts on a tensor or a node",
    features=("split",),
)
def _registered() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    middle: Any = leaf.exp()
    counts = [hooks_registered()]
    for register in (
        leaf.register_hook,
        middle.register_hook,
        leaf.register_post_accumulate_grad_hook,
        middle.grad_fn.register_hook,
        middle.grad_fn.register_prehook,
    ):
        register(_nothing)
        counts.append(hooks_registered())
    return all(later > earlier for earlier, later in itertools.pairwise(counts))


@probe(
    "Node._sequence_nr",
    expected="grows with every node that a thread makes",
    features=("split",),
)
def _sequence() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    first: Any = leaf.exp().grad_fn
    newest = newest_sequence_number()
    second: Any = leaf.exp().grad_fn
    return sequence_number(first) < newest < sequence_number(second)


@probe(
    "RemovableHandle.hooks_dict_ref",
    expected="leads from one hook of a node to the others",
    features=("split",),
)
def _node_hooks() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    function: Any = leaf.exp().grad_fn
    accumulate = function.next_functions[0][0]
    counted = hooks_registered()
    clean = not has_node_hooks(function) and not has_node_hooks(accumulate)
    counted = hooks_registered() - counted
    function.register_prehook(_nothing)
    accumulate.register_hook(_nothing)
    return clean and counted == 2 * PROBING and has_node_hooks(function) and has_node_hooks(accumulate)


@probe("Tensor._is_zerotensor", expected="tells zeros that have no memory", features=("split",))
def _zero_tensor() -> bool:
    leaf = torch.ones(2, requires_grad=True)
    (zeros,) = torch.autograd.grad(leaf.sgn().sum(), leaf)
    return is_zero_tensor(zeros) and not is_zero_tensor(torch.zeros(2)) and not is_zero_tensor(torch.zeros_like(zeros))


@probe(
    "torch._C._is_grad_layout_enforcement_enabled",
    expected="follows torch.autograd.enforce_grad_layout_policy, where torch has that",
    features=("split",),
)
def _layout() -> bool:
    policy: Any = getattr(torch.autograd, "enforce_grad_layout_policy", None)
    if policy is None:
        return layout_enforced()
    with policy(False):
        relaxed = not layout_enforced()
    return relaxed and layout_enforced()
