"""A custom Function on the spine: what is called in place of its backward in I.

If calls that look like this one are known to be as good in two parts, the inputs' part is called, and the weights' part
is kept for W. Otherwise the backward is called whole, and may be tried.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from sternway._torch.autograd import gradient_slots
from sternway._torch.functions import call_backward, function_of
from sternway.errors import SplitError
from sternway.split._later import Later
from sternway.split._part import Cut, Node, Packing, Part, sum_to
from sternway.split.learned._call import BackwardCall, Grads, one_for_each
from sternway.split.learned._effects import RandomState, Surroundings
from sternway.split.learned._later import CallGradient, DeferredCall
from sternway.split.learned._record import FunctionRecord, LearnedKind
from sternway.split.learned._try import TrialOutcome, attempt, parts_of, returns_only

_NO_GRAD = torch.empty(0)  # a Part has the gradient of its node's output; the deferred call has those of all outputs


def function_cut(
    record: FunctionRecord, node: Node, parts: list[Part], packing: Packing, exact: bool
) -> FunctionCut | None:
    """A cut at a Function's node, if its backward is called in two parts or may be tried.

    Args:
        record: what is known of the Function.
        node: the node.
        parts: the weights among its inputs.
        packing: which hooks packed its saved tensors.
        exact: whether the split was asked for every bit.
    """
    inputs = _inputs_behind(node)
    if not parts or inputs is None:
        return None
    cut = FunctionCut(record, node, parts, packing, inputs, exact)
    kind = cut.kind()
    if kind.verdict == "untried" and not any(map(_has_matrix, parts)):
        kind.stay_whole("its weights are vectors")  # they take no product, and are not worth what they would hold
    return cut if record.exact is not None and kind.verdict != "whole" else None


def _inputs_behind(node: Node) -> list[int] | None:
    """For each edge of a Function's node, which input of the forward it is of; None if that cannot be told.

    A node has an edge for each tensor that was passed, and a flag for each argument. Those that need a gradient are the
    same, in the same order.
    """
    edges, needs = node.next_functions, node.needs_input_grad
    needed = [index for index, need in enumerate(needs) if need]
    if len(needed) != sum(1 for child, _ in edges if child is not None):
        return None
    following = iter(needed)
    return [next(following) if child is not None else -1 for child, _ in edges]


def _slot(part: Part) -> Any:
    """The shape and dtype that the engine gives to what goes there."""
    child, index = part.edge
    return gradient_slots(child)[index]


def _has_matrix(part: Part) -> bool:
    return len(_slot(part).shape) > 1


@final
class FunctionCut(Cut):
    """A node of a custom Function some of whose weights may wait.

    Args:
        record: what is known of the Function.
        node: the node.
        parts: the weights.
        packing: which hooks packed its saved tensors.
        inputs: for each edge of the node, which input of the forward it is of.
        exact: whether the split was asked for every bit.

    Attributes:
        computed: parts whose gradient is known after all, as the backward was called whole.
        undefined: parts that got no gradient then.
    """

    __slots__ = ("_exact", "_inputs", "_record", "computed", "is_trial", "undefined")

    def __init__(
        self, record: FunctionRecord, node: Node, parts: list[Part], packing: Packing, inputs: list[int], exact: bool
    ) -> None:
        super().__init__(node, parts, packing, runs_in_i=True)
        self._record, self._inputs, self._exact = record, inputs, exact
        self.is_trial = self.kind().verdict != "split"  # then its weights do not wait this time
        self.computed: list[Part] = []
        self.undefined: list[Part] = []

    def kind(self) -> LearnedKind:
        """What is known of the Function, for the weights that wait: some may have been taken off since the plan."""
        waiting = frozenset([self._inputs[part.position] for part in self.parts])
        return self._record.kind(self.node.needs_input_grad, waiting)

    def call(self, *grads: Tensor | None) -> Grads:
        """Called by the engine in place of the node's backward."""
        kind, exact = self.kind(), self._record.exact
        call = self._read(grads) if kind.verdict != "whole" else None
        form = call.form() if call is not None else None
        if call is None:
            returned = self._whole(grads)
        elif not self.is_trial and kind.splits(form, exact=exact or self._exact):
            in_part = self._in_two_parts(call, kind)
            if in_part is not None:
                return in_part
            returned = self._whole(grads)
        elif kind.may_try(form) and not _is_capturing():
            surroundings = Surroundings(call)
            outcome, returned = _try(call, self._whole(grads), kind, surroundings, exact=bool(exact))
            kind.note(form, outcome)
        else:
            returned = self._whole(grads)
        return returned if self.is_trial else self._hand_over(returned)

    def _whole(self, grads: Grads) -> Grads:
        node = self.node
        return one_for_each(call_backward(node, grads), function_of(node), node.needs_input_grad)

    def _read(self, grads: Grads) -> BackwardCall | None:
        """The call that the engine is about to make; None if what the node saved cannot be read beforehand."""
        try:
            return BackwardCall.of(self.node, grads, self.packing)
        except RuntimeError:  # it was freed, or changed in place: the backward itself will say so
            return None

    def _in_two_parts(self, call: BackwardCall, kind: LearnedKind) -> Grads | None:
        """Call the inputs' part, and keep the weights' part; None if it did not do as in the trial."""
        inputs, weights = parts_of(call.needs, kind.waiting)
        randomness = RandomState(call.device)
        try:
            returned = call.run(inputs)
        except Exception:  # if the whole raises too, that is the error to show
            returned = ()
        if call.was_changed():
            raise SplitError(
                "a backward that is called in two parts must not change tensors in place",
                got=f"{call.function.__name__}, which did not when it was tried",
                fix=f"call split.unlearn({call.function.__name__}) before training; its backward is then called whole",
            )
        if randomness.was_used() or not returns_only(returned, inputs):
            randomness.restore()
            kind.stay_whole("raised, drew random numbers or returned other gradients than when it was tried")
            return None
        kind.calls += 1
        deferred = DeferredCall(call, weights)
        for part in self.parts:
            slot = _slot(part)
            part.later = CallGradient(deferred, self._inputs[part.position], tuple(slot.shape), slot.dtype)
        self.grads.append((_NO_GRAD,))
        return returned

    def _hand_over(self, returned: Grads) -> Grads:
        """Keep the weights' gradients of a whole call, which the engine was not asked for; the others go on."""
        going = list(returned)
        for part in self.parts:
            index, slot = self._inputs[part.position], _slot(part)
            value, going[index] = returned[index], None
            if value is None:
                self.undefined.append(part)
            else:
                part.later = Later(_itself, sum_to(value, tuple(slot.shape)).to(slot.dtype))
                self.computed.append(part)
        self.parts = list(self.computed)
        self.grads.append((_NO_GRAD,))
        return tuple(going)


def _itself(grad: Tensor, value: Tensor) -> Tensor:
    return value


def _try(
    call: BackwardCall, returned: Grads, kind: LearnedKind, surroundings: Surroundings, *, exact: bool
) -> tuple[TrialOutcome, Grads]:
    """Try a call in two parts; the outcome, and the gradients that go on."""
    if changed := surroundings.change():
        return TrialOutcome(False, changed), returned
    if changed := surroundings.change_of_state():
        return TrialOutcome(None if not kind.trials else False, changed), returned  # a cache may fill in the first call
    whole = tuple([None if grad is None else grad.clone() for grad in returned])
    outcome = attempt(call, whole, kind.waiting, surroundings, exact=exact, timed=kind.seconds is None)
    if not outcome.called or all(map(_is_same, returned, whole)):
        return outcome, returned
    return TrialOutcome(False, "returns memory that its next call writes to"), whole


def _is_same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    return mine is None or theirs is None or torch.equal(mine, theirs)


def _is_capturing() -> bool:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return started and torch.cuda.is_current_stream_capturing()
