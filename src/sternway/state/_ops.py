"""The operators that run Python in a compiled graph.

    forward                                   backward
    ───────                                   ────────
    key', token = mark(key)                   give(grad, token)  ── calls the hooks, returns the gradient or theirs
      │     └─ saved for the backward
      └─ the next on_grad's key, and after the last one the state's

Their inputs are integers, so a graph is compiled once for all states and hooks: which functions to call is looked up by
number when the gradient arrives. ``mark`` is a pure function of its key, so compilers may merge or repeat it.

``give`` returns its argument where no hook replaces it, and its schema says so: ``Tensor(a) -> Tensor(a)``. Inductor
then keeps the buffer until both are unused, and no gradient is copied. AOTAutograd refuses such operators;
``_functionalized`` leads this one past it. Several gradients that are shown together first ``arrive``.

Mistakes that are found while tracing are raised when the graph runs (``refuse``), as the error that eager code raises;
raised in the trace, they would be wrapped in Dynamo's.

A CUDA graph is recorded once and replayed without Python, in memory of its own. So Inductor is told to use none for a
graph that has one of these operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sternway._torch import tracing
from sternway.errors import EmptyStateError, StateError
from sternway.state import _tracing
from sternway.state._load import mark_of, wire_of
from sternway.state._run import run, run_together

_LIBRARY = torch.library.Library("sternway", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's

_FILL = "set values between the forward and its backward, and read them in a hook"
SECOND_STATE, NO_GRADIENT, READ, WRITTEN, MADE = range(1, 6)
_REFUSALS: dict[int, tuple[type[StateError], str, str, str]] = {
    SECOND_STATE: (
        StateError,
        "a compiled graph cannot use two states",
        "a second one in the same graph",
        "use one state for all of the graph's hooks, or compile the two parts apart",
    ),
    NO_GRADIENT: (
        StateError,
        "a tensor must require a gradient for one to arrive",
        "on_grad of a tensor with requires_grad=False",
        "leave the hook out, or make an input or a parameter before it require gradients",
    ),
    READ: (EmptyStateError, "a value cannot be read before the backward", "a read in compiled code", _FILL),
    WRITTEN: (StateError, "a value cannot be set in the forward", "a write in compiled code", _FILL),
    MADE: (
        StateError,
        "a state cannot be made in compiled code",
        "BackwardState() there",
        "make it outside, and pass it in or close over it",
    ),
}


def refuse(refusal: int) -> None:
    """Raise the error of this number; 0 is none."""
    if refusal:
        error, rule, got, fix = _REFUSALS[refusal]
        raise error(rule, got=got, fix=fix)


def operator(schema: str, key: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Define an operator: what it does when it runs, and when it is traced."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]  # torch's
    _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    if fake is None:
        return

    def traced(*arguments: Any) -> Any:
        tracing.forbid_cuda_graphs("a sternway.state.BackwardState, whose hooks run Python")
        return fake(*arguments)

    torch.library.register_fake(f"sternway::{name}", traced, lib=_LIBRARY)


def _mark(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    refuse(refusal)
    wire, number = wire_of(key)
    mark = wire.mark(number + 1, graph)
    return torch.tensor(mark.number, device="cpu"), mark.token()


def _arrive(grad: Tensor, token: Tensor, index: int) -> Tensor:
    mark = mark_of(token)
    mark.arrived[index], mark.given = grad, None
    return torch.empty(0, device="cpu")


def _give(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    mark = mark_of(token)
    return run_together(mark, grad, index) if after else run(mark, grad)


def _functionalized(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    plain = tracing.from_functional
    with tracing.without_functionalization():
        dense = plain(grad)
        if 0 in dense.stride():  # an expanded gradient, as from sum(): what a hook returns would not fit its memory
            dense = dense.clone(memory_format=torch.contiguous_format)
        out = torch.ops.sternway.state_give(dense, plain(token), index, [plain(each) for each in after])
    return tracing.to_functional(out)


_RUNS = "CompositeExplicitAutograd"  # on every device, below autograd
operator("state_ask(Tensor y, Tensor key) -> Tensor", _RUNS, lambda y, key: torch.empty(0, 0, 0), _tracing.ask)
operator("state_tell(Tensor y, Tensor key) -> Tensor", _RUNS, lambda y, key: torch.empty(0), _tracing.tell)
operator("state_mark(Tensor key, int graph, int refusal) -> (Tensor, Tensor)", _RUNS, _mark, _tracing.mark)
operator(
    "state_refuse(Tensor key, int refusal) -> Tensor",
    _RUNS,
    lambda key, refusal: refuse(refusal),
    lambda key, refusal: torch.empty_like(key),
)
operator(
    "state_arrive(Tensor grad, Tensor token, int index) -> Tensor",
    _RUNS,
    _arrive,
    lambda grad, token, index: torch.empty(0, device="cpu"),
)
operator(
    "state_give(Tensor(a) grad, Tensor token, int index, Tensor[] after) -> Tensor(a)",
    _RUNS,
    _give,
    lambda grad, token, index, after: grad.view_as(grad),
)
_LIBRARY.impl("state_give", _functionalized, "Functionalize")  # type: ignore[no-untyped-call]
