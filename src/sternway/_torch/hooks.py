"""Hooks on tensors and nodes: which there are, and how to put one where no tensor is left."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sternway._torch.probe import HOOKS_OF_PROBES, probe
from sternway._torch.tensors import ORDINARY


def accumulate_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """What ``register_post_accumulate_grad_hook`` put on a leaf."""
    if type(leaf) in ORDINARY:
        return leaf._post_accumulate_grad_hooks
    with torch._C.DisableTorchFunctionSubclass():
        return leaf._post_accumulate_grad_hooks


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """What ``register_hook`` put on a tensor: a dictionary that torch calls in order, or None."""
    if type(tensor) in ORDINARY:
        return tensor._backward_hooks
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse to be read
        return tensor._backward_hooks


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """A block in which no hook that was put on these leaves before runs."""
    found = (own for leaf in leaves for own in (tensor_hooks(leaf), accumulate_hooks(leaf)) if own)
    held = [(own, dict(own)) for own in {id(own): own for own in found}.values()]
    for own, _ in held:
        own.clear()
    try:
        yield
    finally:
        for own, hooks in held:
            hooks |= own  # those that were put there in the block
            own.clear()
            own.update(hooks)


both_hooks: Callable[[Tensor], tuple[dict[int, Any] | None, dict[int, Any] | None]]
both_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""``tensor_hooks`` and ``accumulate_hooks`` at once, without a Python frame; for tensors of the ``ORDINARY`` types."""

fields_for_writing: Callable[
    [Tensor], tuple[dict[int, Any] | None, dict[int, Any] | None, bool, Tensor | None, torch.dtype]
]
fields_for_writing = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad", "grad", "dtype")
"""What decides whether a leaf's ``.grad`` can be written: ``both_hooks``, and what else is public; in the same way."""


def hooks_registered() -> int:
    """How many hooks Python code has put on tensors, nodes and modules since the process began, probes apart."""
    return RemovableHandle.next_id - HOOKS_OF_PROBES[0]


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


@probe(
    "Tensor._backward_hooks",
    expected="holds a tensor's hooks by key, and calls what is put in their place",
    features=("split", "hooks", "graph"),
    hooks=1,
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
    "Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks",
    expected="are what the engine looks at when it runs",
    features=("pipeline",),
    hooks=2,
)
def _hooks_aside() -> bool:
    leaf, seen = torch.ones(1, requires_grad=True), list[int]()
    leaf.register_hook(lambda _: seen.append(1))
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append(2))
    root = leaf.exp().sum()
    with without_hooks([leaf]):
        root.backward(retain_graph=True)
    aside = list(seen)
    root.backward()
    return (aside, seen) == ([], [1, 2])


@probe(
    "Tensor._post_accumulate_grad_hooks",
    expected="holds the hooks of register_post_accumulate_grad_hook",
    features=("split", "graph"),
    hooks=1,
)
def _accumulate_hooks() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    before = accumulate_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    return before is None and len(accumulate_hooks(leaf) or ()) == 1


@probe(
    "Node._register_hook_dict",
    expected="run a tensor hook at an edge, and tell the order of nodes",
    features=("hooks",),
    hooks=1,
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
    return seen == [[4.0, 4.0], None]


@probe(
    "RemovableHandle.next_id",
    expected="counts every hook that Python puts on a tensor or a node",
    features=("split",),
    hooks=5,
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
    "RemovableHandle.hooks_dict_ref",
    expected="leads from one hook of a node to the others",
    features=("split",),
    hooks=10,
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
