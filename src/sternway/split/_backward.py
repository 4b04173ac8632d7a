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

from sternway.errors import SplitError
from sternway.split._compiled._offer import Offer
from sternway.split._pending import Catch, Pending
from sternway.split._plan import Compiled, Cut, make_plan
from sternway.split._target import Edge, Node
from sternway.split._tree import leaves, pair_leaves, replace_leaves
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
    plan = make_plan([_edge(tensor) for tensor in tensors], set(wanted.values()))

    edges = dict.fromkeys(wanted.values())
    edges |= dict.fromkeys([(leaf, 0) for leaf in (*plan.ready, *plan.triggers)])
    edges |= dict.fromkeys([(cut.node, 0) for cut in plan.cuts if not cut.runs_in_i])
    with (
        _catching(plan.cuts) as catches,
        _offering(plan.compiled) as offers,
        _hidden_hooks([*plan.ready, *plan.triggers]),
        _stopped(plan.inner) as stopped,
    ):
        found = torch.autograd.grad(tensors, [GradientEdge(*edge) for edge in edges], grads, allow_unused=True)
    grad_at = dict(zip(edges, found, strict=True)) | stopped
    for catch in catches:
        if not catch.cut.runs_in_i:
            catch.grads.append((grad_at[catch.cut.node, 0],))
    ready = [(leaf, grad) for leaf in plan.ready if (grad := grad_at[leaf, 0]) is not None]
    pending = Pending(catches, ready, [part for offer in offers for part in offer.parts])
    refuse_resharded(pending.deferred)
    return replace_leaves(lambda leaf: grad_at[wanted[id(leaf)]] if id(leaf) in wanted else None, inputs), pending


@contextmanager
def _catching(cuts: list[Cut]) -> Iterator[list[Catch]]:
    """While the engine runs, catch at each cut the gradient that arrives there and what W needs beside it."""
    catches = [Catch(cut) for cut in cuts]
    handles = []
    try:
        for catch in catches:
            if catch.cut.checkpointed:
                handles.append(catch.cut.node.register_prehook(catch.read_and_keep))
            else:
                catch.read()
                if catch.cut.runs_in_i:
                    handles.append(catch.cut.node.register_prehook(catch.grads.append))
        yield catches
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _offering(compiled: list[Compiled]) -> Iterator[list[Offer]]:
    """While the engine runs, let compiled graphs leave their weight gradients to W."""
    offers = [Offer(each.node, each.positions) for each in compiled]
    handles = []
    try:
        for offer in offers:
            handles += [offer.node.register_prehook(offer.before), offer.node.register_hook(offer.after)]
        yield offers
    finally:
        for offer in offers:
            offer.open = False
        for handle in handles:
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
