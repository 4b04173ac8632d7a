"""One call for many gradients: once per backward, and nothing kept of one that failed.

A backward is one call of the engine, which numbers them. For each, a group of places keeps a ``_Run``: what has arrived
and what is still to come. Two questions decide the design.

*Who owns the run?* If the group did, a failed backward would leave its run behind. So the engine does: the run is the
callback that the engine is asked to call at the end, and dies with the backward, however it ends. The group knows it
weakly. At the end, the callback also hands over what has come if something expected has not.

*What is still to come?* The engine tells, given the node. But a hook that holds nodes makes a ring through C++ that
Python's collector cannot see (node → hook → node), and the graph is never freed. So:

    leaf            known by a weak reference to the tensor, which its AccumulateGrad node keeps alive
    tensor          known by a weak reference while its owner keeps it, and it was not changed in place
    edge, lost      held by the next place above it in the graph: such references run downwards only, as the graph's
    tensor          own do, and make no ring

Of a place that lives but that none of these finds (the top one, in a backward that passes it by), the group learns only
at the end of the backward, and calls then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from sternway.errors import HookError
from sternway.hooks._handle import Handle
from sternway.hooks._places import attach, leaf_node, resolve

Grad = Tensor | None


def on_grads(
    places: Tensor | GradientEdge | Node | Iterable[Tensor | GradientEdge | Node],
    fn: Callable[..., Any],
    mode: Literal["all", "any"] = "all",
) -> Handle:
    """Call ``fn`` once in each backward that reaches some of ``places``.

    Example:
        >>> a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> handle = on_grads([a, b], lambda grads: print(grads))
        >>> (2 * a + 3 * b).sum().backward()
        (tensor([2.]), tensor([3.]))
        >>> handle.remove()

    Args:
        places: tensors that require gradients, ``GradientEdge``s, or graph nodes with one output.
        fn: with "all", ``fn(grads)``, a tuple with one entry for each place, None where no gradient came or an
            undefined one did, when the last that this backward computes has come. With "any", ``fn(grad)`` with the
            first gradient that is defined (None at the end of a backward in which none was).
        mode: "all" or "any".

    Returns:
        A handle: ``remove()`` it, or use it in a ``with`` block.

    A backward is one call of the engine, by ``backward`` or ``autograd.grad``; one inside another (a reentrant
    checkpoint) counts as its own. Gradients are what tensor hooks that were registered before leave of them.
    ``fn`` must not change them; what it returns is ignored, what it raises stops the backward.

    Raises:
        HookError: a place that no gradient can arrive at.
    """
    single = isinstance(places, Tensor | GradientEdge | Node)
    HookError.unless(
        single or isinstance(places, Iterable), "places are tensors, edges or nodes", places, "pass a list of them"
    )
    listed: list[Any] = [places] if single else list(places)  # type: ignore[arg-type]  # not single: iterable
    if not listed:
        raise HookError("a hook needs at least one place", got="none", fix="pass tensors, edges or nodes")
    if mode not in ("all", "any"):
        raise HookError("mode is 'all' or 'any'", got=repr(mode), fix="pass one of the two")
    if not callable(fn):
        raise HookError("fn is called with the gradients", got=f"a {type(fn).__name__}", fix="pass a function")
    return watch([resolve(place, f"places[{index}]") for index, place in enumerate(listed)], fn, mode)


def watch(places: list[Tensor | GradientEdge], fn: Callable[..., Any], mode: str) -> Handle:
    """``on_grads`` for places that are known to be good."""
    group = _Group(fn, mode)
    watchers = [_Watcher(group, index, place) for index, place in enumerate(places)]
    inner: dict[Any, list[_Watcher]] = {}
    for watcher, place in zip(watchers, places, strict=True):
        if watcher.leaf is None:
            inner.setdefault(place.grad_fn if isinstance(place, Tensor) else place.node, []).append(watcher)
    for below, above in pairwise(sorted(inner, key=lambda node: node._sequence_nr())):
        for watcher in inner[above]:
            watcher.below, watcher.at_below = below, frozenset(lower.index for lower in inner[below])
    group.watchers = [ref(watcher) for watcher in watchers]
    return Handle([attach(place, watcher) for place, watcher in zip(places, watchers, strict=True)], group.stop)


class _Watcher:
    """The hook at one place. Only the graph (or the leaf) holds it, so it lives as long as the place."""

    __slots__ = ("__weakref__", "at_below", "below", "group", "index", "leaf", "tensor", "version")

    def __init__(self, group: _Group, index: int, place: Tensor | GradientEdge) -> None:
        self.group, self.index = group, index
        self.leaf = ref(place) if isinstance(place, Tensor) and place.is_leaf else None
        self.tensor = ref(place) if isinstance(place, Tensor) and not place.is_leaf else None
        self.version = place._version if isinstance(place, Tensor) else 0
        self.below: Any = None  # the next lower node that has places, and which those are
        self.at_below: frozenset[int] = frozenset()

    def node(self) -> Any:
        """This place's node, if it can be found without having held it."""
        if self.leaf is not None:
            leaf = self.leaf()
            return None if leaf is None else leaf_node(leaf)
        tensor = self.tensor() if self.tensor is not None else None
        # Changed in place, the tensor has another node than the one the hook is on.
        return tensor.grad_fn if tensor is not None and tensor._version == self.version else None

    def __call__(self, grad: Grad) -> None:
        self.group.arrive(self.index, grad)


class _Run:
    """One backward, as one group sees it."""

    __slots__ = ("__weakref__", "done", "grads", "group", "waiting")

    def __init__(self, group: _Group, waiting: set[int]) -> None:
        self.group, self.waiting = group, waiting
        self.grads: list[Grad] = [None] * len(group.watchers)
        self.done = False

    def __call__(self) -> None:
        """The engine has finished: hand over what has come, unless that was done."""
        self.group.finish(self)


class _Group:
    """The places of one registration, and the backwards that are under way."""

    def __init__(self, fn: Callable[..., Any], mode: str) -> None:
        self.fn, self.first_only = fn, mode == "any"
        self.watchers: list[ref[_Watcher]] = []
        self.runs: WeakValueDictionary[int, _Run] = WeakValueDictionary()
        self.lock = threading.Lock()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def arrive(self, index: int, grad: Grad) -> None:
        if self.stopped:
            return
        number = torch._C._current_graph_task_id()
        with self.lock:
            run = self.runs.get(number)
            if run is None:
                run = _Run(self, set() if self.first_only else self.to_come(index))
                torch.autograd.Variable._execution_engine.queue_callback(run)
                self.runs[number] = run
            if run.done:
                return
            run.grads[index] = grad
            run.waiting.discard(index)
            run.done = ready = grad is not None if self.first_only else not run.waiting
        if ready:
            self.call(run, grad)

    def finish(self, run: _Run) -> None:
        with self.lock:
            late, run.done = not run.done and not self.stopped, True
        if late:
            self.call(run, None)

    def call(self, run: _Run, grad: Grad) -> None:
        grads, run.grads = run.grads, []
        self.fn(grad if self.first_only else tuple(grads))

    def to_come(self, here: int) -> set[int]:
        """The places that this backward will reach, or that may be reached for all we can tell."""
        living = {watcher.index: watcher for known in self.watchers if (watcher := known()) is not None}
        held = {index: watcher.below for watcher in living.values() for index in watcher.at_below}
        expected = {here}
        for index, watcher in living.items():
            node = held.get(index)
            if node is None:
                node = watcher.node()
            if node is None or will_run(node):
                expected.add(index)
        return expected


def will_run(node: Any) -> bool:
    """Whether a gradient will arrive at the node in the backward that is under way."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # Of a leaf whose gradient autograd.grad was asked for, the engine refuses to say what that very refusal says.
        if "autograd.grad" in str(error):
            return True
        raise
