"""I: the input gradients now, and a ``Pending`` that holds what the weight gradients need.

One engine call runs the spine. It is asked for the gradients of the inputs, of the ready weights and of the cuts that
nothing lies below; the engine computes what leads there and nothing else, so the weight's half of each cut is skipped.
At a cut that runs on the way, the engine returns the gradient from before the hooks on tensors. Where nobody can have
put one, as ``own_thread`` says, it is asked for these gradients too. Elsewhere a hook of ours keeps the gradient just
before the node runs: it is final there, and the saved tensors are not freed yet. Everything else is freed as the
engine goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function, has_torch_function

from sternway._torch import autograd
from sternway._torch.failures import failure_of
from sternway._torch.functions import calling_instead
from sternway._torch.saved_hooks import recomputation, sharing
from sternway._torch.tensors import ORDINARY
from sternway._tree import children, leaves, replace_leaves
from sternway.errors import SplitError
from sternway.split._deferred import Deferred
from sternway.split._part import Edge
from sternway.split._pending import Pending
from sternway.split._planner import make_plan
from sternway.split._unseen import UNSEEN
from sternway.split._unsupported import a_second_time, refuse_resharded, spend
from sternway.split.compiled._offer import Offer, making
from sternway.split.eager._catch import catching, stopping, without_hooks
from sternway.split.eager._work import deferred_work, in_order


def backward_input(
    outputs: Any, grad_outputs: Any = None, inputs: Any = (), *, exact: bool = False, own_thread: bool = False
) -> tuple[Any, Pending]:
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
            their ``.grad`` is not changed. One tensor alone must need a gradient; in a list, some need none, such as
            token ids.
        exact: whether what W adds to a ``.grad`` that is there already must equal autograd's in every bit. Otherwise a
            matrix product is added in the kernel that computes it, which is faster and rounds once less. Where there
            are hooks, a parameter that is used both as it is and transposed may differ in the last bit all the same.
        own_thread: whether this thread has made the whole graph. I is a little faster then, since it puts no hooks of
            its own where nobody can have put one. If it is not so, hooks on activations may be missed in W.

    Returns:
        The gradients, nested as ``inputs``, None for an input that needs none or that the outputs do not depend on;
        and the ``Pending``.

    Raises:
        SplitError: the backward cannot be split. Nothing was computed; the message says what to change.
    """
    tensors, grads = _roots(outputs, grad_outputs)
    others = [tensor for tensor in tensors if type(tensor) not in ORDINARY]
    if others and has_torch_function(others):  # a subclass may stand for another tensor, which it then passes to us
        return handle_torch_function(
            backward_input, others, outputs, grad_outputs, inputs, exact=exact, own_thread=own_thread
        )
    wanted = edges_of(inputs, "inputs")
    if isinstance(inputs, Tensor) and not wanted:
        raise SplitError(
            "the input whose gradient is asked for must require one",
            got=f"{_describe(inputs)} that does not",
            fix="call x.requires_grad_() before the forward; or, if no gradient is needed, leave inputs out",
        )
    plan = make_plan([edge_of(tensor) for tensor in tensors], set(wanted.values()), exact)

    places = plan.inputs
    bottom = [cut for cut in plan.cuts if not cut.runs_in_i]
    quiet = own_thread and plan.is_quiet
    taken = plan.cuts if quiet else bottom
    asked = [*plan.ready, *plan.triggers]
    nodes = [*plan.ready, *[cut.node for cut in taken]]
    edges = [GradientEdge(*place) for place in places] + [GradientEdge(node, 0) for node in nodes]
    edges += [GradientEdge(*part.edge) for part in plan.branches] + [GradientEdge(node, 0) for node in plan.triggers]
    offers = [Offer(each.node, each.positions) for each in plan.opaque]
    group = recomputation() if plan.recomputes else None
    with _used_once(), sharing(group) if group else nullcontext():
        calls = {cut.node: cut.call for cut in (*plan.functions, *plan.trials)}
        with (
            catching(plan.cuts, quiet),
            calling_instead(calls) if calls else nullcontext(),
            making(offers),
            without_hooks(asked) as ran,
            stopping(plan.inner) as stopped,
        ):
            found = torch.autograd.grad(tensors, edges, grads, allow_unused=True) if edges else ()
        of_nodes = found[len(places) :]
        for cut, grad in zip(taken, of_nodes[len(plan.ready) :], strict=False):
            cut.keep(grad)
        for cut in bottom:
            spend(cut.node)
    UNSEEN.count_own(len(bottom))
    of_leaves = list(zip(plan.ready, of_nodes, strict=False))
    ready = [(leaf, grad) for leaf, grad in of_leaves if grad is not None]
    ready += [part for offer in offers for part in offer.ready]
    at_branches = list(zip(plan.branches, of_nodes[len(nodes) :], strict=False))
    missed = [part for part, grad in at_branches if grad is None]
    cuts = [*plan.cuts, *plan.functions] if plan.functions else plan.cuts
    missed += [part for function in plan.functions for part in function.undefined]
    computed = {part for function in plan.functions for part in function.computed}
    missed += [part for cut in cuts if not cut.grads or cut.grads[0][0] is None for part in cut.parts]
    undefined = [leaf for leaf, grad in of_leaves if grad is None] + [leaf for part in missed for leaf in part.leaves()]
    direct, through_graph = deferred_work(
        in_order(cuts) if exact else cuts, ready, [pair for pair in at_branches if pair[1] is not None], computed
    )
    work: list[Deferred] = [direct, *(offer.work for offer in offers if offer.work is not None), through_graph]
    pending = Pending(work, ran, undefined, exact, group)
    refuse_resharded(pending.deferred)
    grad_at = dict(zip(places, found, strict=False)) | stopped
    return replace_leaves(lambda leaf: grad_at.get(wanted[id(leaf)]) if id(leaf) in wanted else None, inputs), pending


@contextmanager
def _used_once() -> Iterator[None]:
    """A block that uses a graph. If its backward has run, torch says to pass retain_graph=True; a split has none."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, SplitError) and failure_of(error) == "twice":
            raise a_second_time() from error
        raise


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
        if not isinstance(output, GradientEdge) and not (isinstance(output, Tensor) and output.requires_grad):
            continue
        shape = _shape(output)
        if grad is None:
            seen_any = True
            if shape is None or prod(shape) != 1:
                if grad_outputs is None:
                    raise SplitError(
                        "grad_outputs cannot be left out unless every output is a scalar",
                        got=f"{where}, which is {_describe(output)}, and no grad_outputs",
                        fix="pass grad_outputs, nested as the outputs are",
                    )
                continue
        elif not isinstance(grad, Tensor) or _shape(grad) != shape:
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
            got=f"{sum(1 for _ in leaves(outputs))} outputs, each of which does not require grad and does not have a "
            "grad_fn",
            fix="run the forward with gradients enabled and outside torch.no_grad()",
        )
    return tensors, grads


def _shape(place: Tensor | GradientEdge) -> tuple[int, ...] | None:
    """The shape of a tensor, or of the gradient that arrives at an edge; None of nested tensors that have none."""
    if isinstance(place, GradientEdge):
        return tuple(autograd.gradient_slots(place.node)[place.output_nr].shape)
    return None if place.is_nested and place.layout is torch.strided else tuple(place.shape)


def _describe(value: Any) -> str:
    if isinstance(value, GradientEdge):
        return f"an edge for gradients of shape {_shape(value)}"
    if isinstance(value, Tensor):
        shape = _shape(value)
        return "a nested tensor" if shape is None else f"a tensor of shape {shape}"
    parts = children(value)
    keys = f" with {list(value)}" if isinstance(value, Mapping) else ""
    return f"a {type(value).__name__}" + (f" of {len(parts)}" if parts is not None else "") + keys
