"""I: the input gradients now, and a ``Pending`` that holds what the weight gradients need.

One engine call runs the spine. It is asked for the gradients of the inputs, of the ready weights and of the cuts that
nothing lies below; the engine computes what leads there and nothing else, so the weight's half of each cut is skipped.
A cut that runs on the way is caught by a hook, just before it runs: there the gradient is final (hooks on tensors may
still have changed it), and the saved tensors are still there. Everything else is freed as the engine goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sternway._tree import leaves, replace_leaves
from sternway.errors import SplitError
from sternway.split._compiled._offer import Offer, making
from sternway.split._pairs import pair_leaves
from sternway.split._part import Cut
from sternway.split._pending import Pending
from sternway.split._plan import make_plan
from sternway.split._target import Edge, Node
from sternway.split._unsupported import refuse_resharded


def backward_input(outputs: Any, grad_outputs: Any = None, inputs: Any = ()) -> tuple[Any, Pending]:
    """Compute the gradients of ``inputs`` now and leave the parameters' gradients to ``Pending.run()``.

    Together the two halves do what ``torch.autograd.backward(outputs, grad_outputs)`` does, for the part of the graph
    between ``outputs`` and ``inputs``: every other leaf that needs a gradient gets it in ``.grad``, its hooks run.

    Example:
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> grad, pending = backward_input(layer(x).sum(), None, x)
        >>> layer.weight.grad is None
        True
        >>> pending.run()
        >>> layer.weight.grad.shape
        torch.Size([4, 4])

    Args:
        outputs: tensors, in any nesting of tuples, lists, dicts and dataclasses; what is not a tensor, or needs no
            gradient, is passed over. A ``GradientEdge`` will do for a tensor.
        grad_outputs: a gradient for each output, nested alike. None stands for no gradient, except that a scalar's
            is 1, as in ``backward()``.
        inputs: where to stop: the tensors (or ``GradientEdge``s) whose gradients are returned. Gradient does not flow
            past them, and their ``.grad`` is not touched.

    Returns:
        The gradients, nested as ``inputs``, None where there is none, and the ``Pending``.

    Raises:
        SplitError: a backward that cannot be split, before anything is computed; the message says what to change.
    """
    tensors, grads = _roots(outputs, grad_outputs)
    wanted = _input_edges(inputs)
    places = list(dict.fromkeys(wanted.values()))
    plan = make_plan([_edge(tensor) for tensor in tensors], set(places))

    bottom = [cut for cut in plan.cuts if not cut.runs_in_i]
    nodes = [*plan.ready, *[cut.node for cut in bottom]]
    edges = [GradientEdge(*place) for place in places] + [GradientEdge(node, 0) for node in (*nodes, *plan.triggers)]
    offers = [Offer(each.node, each.positions) for each in plan.compiled]
    hidden = [*plan.ready, *plan.triggers]
    with _catching(plan.cuts), making(offers), _hidden_hooks(hidden), _stopped(plan.inner) as stopped:
        found = torch.autograd.grad(tensors, edges, grads, allow_unused=True)
    of_nodes = found[len(places) :]
    for cut, grad in zip(bottom, of_nodes[len(plan.ready) :], strict=False):
        cut.grads.append((grad,))
    ready = [(leaf, grad) for leaf, grad in zip(plan.ready, of_nodes, strict=False) if grad is not None]
    ready += [part for offer in offers for part in offer.ready]
    pending = Pending(plan.cuts, ready, [offer.block for offer in offers if offer.block is not None])
    refuse_resharded(pending)
    grad_at = dict(zip(places, found, strict=False)) | stopped
    return replace_leaves(lambda leaf: grad_at[wanted[id(leaf)]] if id(leaf) in wanted else None, inputs), pending


@contextmanager
def _catching(cuts: list[Cut]) -> Iterator[None]:
    """While the engine runs, catch at each cut the gradient that arrives there and what W needs beside it.

    A hook that only appends to a list may stay: the engine frees what it has run, and ``Pending`` empties the list.
    """
    handles, readers = [], []
    try:
        for cut in cuts:
            if cut.is_read_as_it_runs:
                readers.append(cut.node.register_prehook(cut.read_and_keep))
            else:
                cut.read()
                if cut.runs_in_i:
                    handles.append(cut.node.register_prehook(cut.grads.append))
        yield
        handles.clear()
    finally:
        for handle in (*handles, *readers):
            handle.remove()


@contextmanager
def _stopped(edges: list[Edge]) -> Iterator[dict[Edge, Tensor | None]]:
    """While the engine runs, take what arrives at ``edges`` and let it go no further."""
    arrived: dict[Edge, Tensor | None] = {}

    def stop(node: Node, indices: list[int], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        arrived.update({(node, index): grads[index] for index in indices})
        return tuple(None if index in indices else grad for index, grad in enumerate(grads))

    handles = [
        node.register_prehook(partial(stop, node, [index for other, index in edges if other is node]))
        for node in dict.fromkeys(node for node, _ in edges)
    ]
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()


def _roots(outputs: Any, grad_outputs: Any) -> tuple[list[Any], list[Tensor | None]]:
    """The outputs that gradient starts from, with their gradients."""
    tensors: list[Any] = []
    grads: list[Tensor | None] = []
    seen_any = False
    for where, output, grad in pair_leaves(outputs, grad_outputs):
        if isinstance(output, GradientEdge):
            if grad is None:
                raise SplitError(
                    "an output given as a GradientEdge comes with its gradient",
                    got=f"None for {where}",
                    fix="pass a tensor in grad_outputs",
                )
        elif not isinstance(output, Tensor) or not output.requires_grad:
            continue
        elif grad is None:
            seen_any = True
            if output.numel() != 1:
                if grad_outputs is None:
                    raise SplitError(
                        "only a scalar's gradient can be left out",
                        got=f"{where} of shape {tuple(output.shape)} and no grad_outputs",
                        fix="pass grad_outputs, nested as the outputs are",
                    )
                continue
        elif not isinstance(grad, Tensor) or grad.shape != output.shape:
            raise SplitError(
                "an output's gradient is a tensor of the output's shape, or None",
                got=f"{_describe(grad)} for {where}, which is {_describe(output)}",
                fix="pass the gradient that the next stage sent back for it",
            )
        seen_any = True
        tensors.append(output)
        grads.append(grad)
    if not seen_any:
        raise SplitError(
            "at least one output must need a gradient",
            got=f"{sum(1 for _ in leaves(outputs))} outputs, none of which does",
            fix="run the forward with gradients enabled and outside torch.no_grad()",
        )
    return tensors, grads


def _input_edges(inputs: Any) -> dict[int, Edge]:
    """Where each input that needs a gradient sits in the graph, by the input's id."""
    for leaf in leaves(inputs):
        if isinstance(leaf, Iterable) and not isinstance(leaf, Tensor | GradientEdge | str | bytes):
            raise SplitError(
                "inputs are nested in tuples, lists, dicts and dataclasses",
                got=f"a {type(leaf).__name__}",
                fix="make a list or a tuple of it",
            )
    return {
        id(leaf): _edge(leaf)
        for leaf in leaves(inputs)
        if isinstance(leaf, GradientEdge) or (isinstance(leaf, Tensor) and leaf.requires_grad)
    }


def _edge(place: Tensor | GradientEdge) -> Edge:
    edge = place if isinstance(place, GradientEdge) else get_gradient_edge(place)
    return edge.node, edge.output_nr


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def _hidden_hooks(leaves: list[Node]) -> Iterator[None]:
    """Keep the parameters' own hooks from running in I, where the engine hands us a gradient that is not theirs yet.

    Reading a gradient at a leaf runs the leaf's tensor hooks. They must run once, in W, on the whole gradient.
    """
    hidden = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf.variable._backward_hooks)]
    for hooks, held in hidden:
        hooks.update(dict.fromkeys(held, _no_hook))
    try:
        yield
    finally:
        for hooks, held in hidden:
            hooks.update({key: hook for key, hook in held.items() if key in hooks})  # some may be removed by now


def _no_hook(grad: Tensor) -> None:
    """In the place of a hook whose turn has not come."""
