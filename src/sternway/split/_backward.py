"""I: the input gradients now, and a ``Pending`` that holds what the weight gradients need.

One engine call runs the spine. It is asked for the gradients of the inputs, of the ready weights and of the cuts that
nothing lies below; the engine computes what leads there and nothing else, so the weight's half of each cut is skipped.
At a cut that runs on the way, the engine returns the gradient from before the hooks on tensors. Where nobody can have
put one, as ``own_thread`` says, it is asked for these gradients too. Elsewhere a hook of ours keeps the gradient just
before the node runs: it is final there, and the saved tensors are not freed yet. Everything else is freed as the
engine goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function, has_torch_function

from sternway._torch.autograd import edge_of as gradient_edge
from sternway._torch.autograd import gradients_at, in_forward_mode
from sternway._torch.failures import failure_of
from sternway._torch.functions import calling_instead, functions_outlive_graphs
from sternway._torch.parallel import in_process_group
from sternway._torch.saved_hooks import recomputation, sharing
from sternway._torch.tensors import ORDINARY
from sternway._tree import replace_leaves
from sternway.errors import SplitError
from sternway.split._deferred import Deferred
from sternway.split._part import Edge, Node, Part
from sternway.split._pending import Pending
from sternway.split._places import describe, edge_of, edges_of, root_of, roots_of
from sternway.split._plan import SplitPlan
from sternway.split._planner import make_plan
from sternway.split._unseen import UNSEEN
from sternway.split._unsupported import a_second_time, refuse_resharded, spend
from sternway.split.compiled._offer import Offer, making
from sternway.split.eager._catch import catching, stopping, without_hooks
from sternway.split.eager._hiding import Ran
from sternway.split.eager._native import native_plan
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
    if torch.is_inference_mode_enabled():  # gradients of that mode could not be added to later
        with torch.inference_mode(False):
            return backward_input(outputs, grad_outputs, inputs, exact=exact, own_thread=own_thread)
    if in_forward_mode():
        raise SplitError(
            "the split must not run in forward mode: what W keeps has no tangents",
            got="backward_input within torch.autograd.forward_ad.dual_level()",
            fix="call torch.autograd.backward there, or leave dual_level() before",
        )
    tensors, grads = roots_of(outputs, grad_outputs)
    others = [tensor for tensor in tensors if type(tensor) not in ORDINARY]
    if others and has_torch_function(others):  # a subclass may stand for another tensor, which it then passes to us
        return handle_torch_function(
            backward_input, others, outputs, grad_outputs, inputs, exact=exact, own_thread=own_thread
        )
    wanted = edges_of(inputs, "inputs")
    if isinstance(inputs, Tensor) and not wanted:
        raise SplitError(
            "the input whose gradient is asked for must require one",
            got=f"{describe(inputs)} that does not",
            fix="call x.requires_grad_() before the forward; or, if no gradient is needed, leave inputs out",
        )
    plan = native_plan(tensors, wanted.values(), exact, own_thread)
    if plan is None:
        plan = make_plan([edge_of(tensor) for tensor in tensors], set(wanted.values()), exact)
    kept = list(map(root_of, tensors)) if not functions_outlive_graphs() and plan.leads_to_functions else []
    bottom = [cut for cut in plan.cuts if not cut.runs_in_i]
    asked = own_thread and plan.is_quiet
    taken = plan.cuts if asked else bottom
    native = plan.native
    nodes = [*plan.ready, *[cut.node for cut in taken], *(native.asked if native else ())]
    edges = [GradientEdge(*place) for place in plan.inputs] + list(map(GradientEdge, nodes, repeat(0)))
    edges += [GradientEdge(*part.edge) for part in plan.branches] + [GradientEdge(node, 0) for node in plan.triggers]
    offers = [Offer(each.node, each.positions) for each in plan.opaque]
    group = recomputation() if plan.recomputes else None
    with _used_once(), sharing(group) if group else nullcontext():
        with _preparing(plan, offers, asked) as (ran, mark, stopped):
            if mark is not None:
                edges, tensors, grads = [*edges, gradient_edge(mark)], [*tensors, mark], [*grads, torch.empty(0)]
            found = gradients_at(edges, tensors, grads) if edges else ()
        answers = iter(found)  # one for each edge, in order
        grad_at = dict(zip(plan.inputs, answers, strict=False)) | stopped
        at_leaves = list(zip(plan.ready, answers, strict=False))
        for cut, grad in zip(taken, answers, strict=False):
            cut.keep(grad)
        by_native = (
            native.finish([*map(itemgetter(1), at_leaves), *islice(answers, len(native.asked))]) if native else None
        )
        at_branches = list(zip(plan.branches, answers, strict=False))
        unrun = [*[cut.node for cut in bottom], *(native.bottom if native else ())]
        for node in unrun:
            spend(node)
    UNSEEN.count_own(len(unrun))
    work, undefined = _left_for_w(plan, () if native else at_leaves, at_branches, offers, exact)
    if by_native:
        work, undefined = [by_native[0], *work], by_native[1] + undefined
    pending = Pending(work, ran, undefined, exact, group, kept)
    if in_process_group():
        refuse_resharded(pending.deferred)
    return replace_leaves(lambda leaf: grad_at.get(wanted[id(leaf)]) if id(leaf) in wanted else None, inputs), pending


@contextmanager
def _preparing(
    plan: SplitPlan, offers: list[Offer], asked: bool
) -> Iterator[tuple[Ran, Tensor | None, dict[Edge, Tensor | None]]]:
    """A block in which the engine runs the spine: the cuts keep what W needs, and gradient stops at the inputs.

    Gives the hooks of parameters that ran all the same, the mark by which hidden ones know this backward, and the
    gradients that were stopped.
    """
    calls = {cut.node: cut.call for cut in (*plan.functions, *plan.trials)}
    with (
        catching(plan.cuts, plan.is_quiet, asked),
        calling_instead(calls) if calls else nullcontext(),
        making(offers) if offers else nullcontext(),
        without_hooks([*plan.ready, *plan.triggers]) as (ran, mark),
        plan.native.catching() if plan.native else nullcontext(),
        stopping(plan.inner) as stopped,
    ):
        yield ran, mark, stopped


def _left_for_w(
    plan: SplitPlan,
    at_leaves: Sequence[tuple[Node, Tensor | None]],
    at_branches: Sequence[tuple[Part, Tensor | None]],
    offers: Sequence[Offer],
    exact: bool,
) -> tuple[list[Deferred], list[Node]]:
    """What W has to do after I, and the leaves that no gradient arrived at."""
    cuts = [*plan.cuts, *plan.functions] if plan.functions else plan.cuts
    ready = [(leaf, grad) for leaf, grad in at_leaves if grad is not None]
    direct, through_graph, missed = deferred_work(
        in_order(cuts) if exact else cuts,
        ready=ready + [part for offer in offers for part in offer.ready] if offers else ready,
        branches=[(part, grad) for part, grad in at_branches if grad is not None],
        computed={part for function in plan.functions for part in function.computed},
    )
    undefined: list[Node] = []
    if len(ready) < len(at_leaves):
        undefined += [leaf for leaf, grad in at_leaves if grad is None]
    missed += [part for part, grad in at_branches if grad is None]
    missed += [part for function in plan.functions for part in function.undefined]
    undefined += [leaf for part in missed for leaf in part.leaves()]
    return [direct, *(offer.work for offer in offers if offer.work is not None), through_graph], undefined


@contextmanager
def _used_once() -> Iterator[None]:
    """A block that uses a graph. If its backward has run, torch says to pass retain_graph=True; a split has none."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, SplitError) and failure_of(error) == "twice":
            raise a_second_time() from error
        raise
