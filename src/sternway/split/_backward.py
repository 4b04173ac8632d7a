"""I: the input gradients now, and a ``Pending`` that holds what the weight gradients need.

One engine call runs the spine. It is asked for the gradients of the inputs, of the ready weights and of the cuts that
nothing lies below; the engine computes what leads there and nothing else, so the weight's half of each cut is skipped.
At a cut that runs on the way, a hook keeps the gradient just before the node runs: it is final there (hooks on tensors
have run), and the saved tensors are not freed yet. Everything else is freed as the engine goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway._torch import autograd
from sternway._torch.saved_hooks import recomputation, sharing
from sternway._tree import children, leaves, replace_leaves
from sternway.errors import SplitError
from sternway.split._deferred import Deferred
from sternway.split._part import Edge
from sternway.split._pending import Pending
from sternway.split._planner import make_plan
from sternway.split._unseen import UNSEEN
from sternway.split._unsupported import refuse_resharded, spend
from sternway.split.compiled._offer import Offer, making
from sternway.split.eager._catch import catching, stopping, without_hooks
from sternway.split.eager._work import deferred_work


def backward_input(outputs: Any, grad_outputs: Any = None, inputs: Any = ()) -> tuple[Any, Pending]:
    """Compute the gradients of ``inputs`` now, and leave the parameters' gradients to ``Pending.run()``.

    Together the two halves do what ``torch.autograd.backward(outputs, grad_outputs)`` does, for the part of the graph
    between ``outputs`` and ``inputs``: every other leaf that needs a gradient gets it in ``.grad``, and its hooks run.

    Example:
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> grad, pending = backward_input(layer(x).sum(), None, x)
        >>> layer.weight.grad is None
        True
        >>> pending.run()
        >>> layer.weight.grad.shape
        torch.Size([4, 4])

    Args:
        outputs: tensors, in any nesting of tuples, lists, dicts and dataclasses. What is not a tensor, or needs no
            gradient, is skipped. A ``GradientEdge`` may stand for a tensor.
        grad_outputs: a gradient for each output, nested in the same way. None means no gradient, except that a
            scalar's is 1, as in ``backward()``.
        inputs: the tensors (or ``GradientEdge``s) whose gradients are returned. Gradient does not flow past them, and
            their ``.grad`` is not changed.

    Returns:
        The gradients, nested as ``inputs``, None where there is none; and the ``Pending``.

    Raises:
        SplitError: the backward cannot be split. Nothing was computed; the message says what to change.
    """
    tensors, grads = _roots(outputs, grad_outputs)
    wanted = edges_of(inputs, "inputs")
    plan = make_plan([edge_of(tensor) for tensor in tensors], set(wanted.values()))

    places = plan.inputs
    bottom = [cut for cut in plan.cuts if not cut.runs_in_i]
    asked = [*plan.ready, *plan.triggers]
    nodes = [*plan.ready, *[cut.node for cut in bottom]]
    edges = [GradientEdge(*place) for place in places] + [GradientEdge(node, 0) for node in nodes]
    edges += [GradientEdge(*part.edge) for part in plan.branches] + [GradientEdge(node, 0) for node in plan.triggers]
    offers = [Offer(each.node, each.positions) for each in plan.opaque]
    group = recomputation() if plan.recomputes else None
    with sharing(group) if group else nullcontext():
        with catching(plan.cuts), making(offers), without_hooks(asked) as ran, stopping(plan.inner) as stopped:
            found = torch.autograd.grad(tensors, edges, grads, allow_unused=True) if edges else ()
        of_nodes = found[len(places) :]
        for cut, grad in zip(bottom, of_nodes[len(plan.ready) :], strict=False):
            cut.keep(grad)
            spend(cut.node)
    UNSEEN.count_own(len(bottom))
    of_leaves = list(zip(plan.ready, of_nodes, strict=False))
    ready = [(leaf, grad) for leaf, grad in of_leaves if grad is not None]
    ready += [part for offer in offers for part in offer.ready]
    at_branches = list(zip(plan.branches, of_nodes[len(nodes) :], strict=False))
    missed = [part for part, grad in at_branches if grad is None]
    missed += [part for cut in plan.cuts if not cut.grads or cut.grads[0][0] is None for part in cut.parts]
    undefined = [leaf for leaf, grad in of_leaves if grad is None] + [leaf for part in missed for leaf in part.leaves()]
    direct, through_graph = deferred_work(plan.cuts, ready, [pair for pair in at_branches if pair[1] is not None])
    work: list[Deferred] = [direct, *(offer.work for offer in offers if offer.work is not None), through_graph]
    pending = Pending(work, ran, undefined, group)
    refuse_resharded(pending.deferred)
    grad_at = dict(zip(places, found, strict=False)) | stopped
    return replace_leaves(lambda leaf: grad_at.get(wanted[id(leaf)]) if id(leaf) in wanted else None, inputs), pending


def edges_of(tree: Any, name: str) -> dict[int, Edge]:
    """Where each tensor of ``tree`` that needs a gradient is in the graph, by the tensor's id."""
    for leaf in leaves(tree):
        if isinstance(leaf, Iterable) and not isinstance(leaf, Tensor | GradientEdge | str | bytes):
            raise SplitError(
                f"{name} must be nested in tuples, lists, dicts and dataclasses",
                got=f"a {type(leaf).__name__}",
                fix="make a list or a tuple of it",
            )
    return {
        id(leaf): edge_of(leaf)
        for leaf in leaves(tree)
        if isinstance(leaf, GradientEdge) or (isinstance(leaf, Tensor) and leaf.requires_grad)
    }


def edge_of(place: Tensor | GradientEdge) -> Edge:
    """Where a tensor is in the graph."""
    edge = place if isinstance(place, GradientEdge) else autograd.edge_of(place)
    return edge.node, edge.output_nr


def pair_leaves(outputs: Any, grads: Any, where: str = "outputs") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of ``outputs`` with its name and its leaf of ``grads``; where ``grads`` is None, so are its leaves."""
    parts = children(outputs)
    if parts is None:
        yield where, outputs, grads
        return
    if grads is None:
        for step, part in parts:
            yield from pair_leaves(part, None, where + step)
        return
    theirs = children(grads)
    same_keys = not isinstance(outputs, Mapping) or (isinstance(grads, Mapping) and outputs.keys() == grads.keys())
    if theirs is None or len(theirs) != len(parts) or not same_keys:
        raise SplitError(
            "grad_outputs must be nested as outputs are",
            got=f"{_describe(grads)} for {where}, which is {_describe(outputs)}",
            fix="pass one gradient (or None) for each output, nested in the same way",
        )
    ordered = [grads[key] for key in outputs] if isinstance(outputs, Mapping) else [grad for _, grad in theirs]
    for (step, part), grad in zip(parts, ordered, strict=True):
        yield from pair_leaves(part, grad, where + step)


def _roots(outputs: Any, grad_outputs: Any) -> tuple[list[Any], list[Tensor | None]]:
    """The outputs that gradient starts from, with their gradients."""
    tensors: list[Any] = []
    grads: list[Tensor | None] = []
    seen_any = False
    for where, output, grad in pair_leaves(outputs, grad_outputs):
        if isinstance(output, GradientEdge):
            if grad is None:
                raise SplitError(
                    "an output that is a GradientEdge must have a gradient",
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
                        "grad_outputs cannot be left out unless every output is a scalar",
                        got=f"{where} of shape {tuple(output.shape)} and no grad_outputs",
                        fix="pass grad_outputs, nested as the outputs are",
                    )
                continue
        elif not isinstance(grad, Tensor) or grad.shape != output.shape:
            raise SplitError(
                "an output's gradient must be a tensor of the output's shape, or None",
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


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = children(value)
    keys = f" with {list(value)}" if isinstance(value, Mapping) else ""
    return f"a {type(value).__name__}" + (f" of {len(parts)}" if parts is not None else "") + keys
