"""The operators that stand in a compiled graph for what Python does there.

    forward                                   backward
    ───────                                   ────────
    key' , token = mark(key)                  give(grad, token)  ── calls the hooks, returns the gradient or theirs
       │        └─ saved for the backward
       └─ the next on_grad's key, and after the last one the state's

Integers go in, so a graph is compiled once for every state and every hook: which functions to call is looked up by
number when the gradient comes. ``mark`` is a pure function of its key, so compilers may merge or repeat it.

``give`` returns its argument where no hook replaces it, and says so in its schema: ``Tensor(a) -> Tensor(a)``. Inductor
then keeps the buffer until both are done with, and no gradient is copied. AOTAutograd does not take such operators from
outside; ``_functionalized`` hands this one past it.

``ask`` is a question to the tracer: its answer is a shape, which Dynamo knows while it traces, and its node is dead code
afterwards. It tells which graph is being traced, whether another state is in it, and whether a tensor came from an
earlier ``on_grad``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway.errors import StateError
from sternway.state._load import mark_of, wire_of
from sternway.state._run import run, run_together

_LIBRARY = torch.library.Library("sternway", "FRAGMENT")
_LIBRARY.define("state_ask(Tensor y, Tensor key) -> Tensor")
_LIBRARY.define("state_tell(Tensor y, Tensor key) -> Tensor")
_LIBRARY.define("state_mark(Tensor key, int graph, int refusal) -> (Tensor, Tensor)")
_LIBRARY.define("state_arrive(Tensor grad, Tensor token, int index) -> Tensor")
_LIBRARY.define("state_give(Tensor(a) grad, Tensor token, int index, Tensor[] after) -> Tensor(a)")

SECOND_STATE, NO_GRADIENT = 1, 2
_REFUSALS = {
    SECOND_STATE: StateError(
        "a compiled graph carries one state",
        got="a second one in the same graph",
        fix="use one state for all of the graph's hooks, or compile the two parts apart",
    ),
    NO_GRADIENT: StateError(
        "a gradient arrives only at a tensor that requires one",
        got="on_grad of a tensor with requires_grad=False",
        fix="leave the hook out, or make an input or a parameter before it require gradients",
    ),
}


def refuse(refusal: int) -> None:
    """Raise the error of this number; 0 is none."""
    if refusal:
        error = _REFUSALS[refusal]
        raise StateError(error.rule, got=error.got, fix=error.fix)


# Run.


def _mark(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    refuse(refusal)
    wire, number = wire_of(key)
    mark = wire.mark(number + 1, graph)
    return torch.tensor(mark.number, device="cpu"), mark.token()


def _give(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    mark = mark_of(token)
    return run_together(mark, index) if after else run(mark, grad)


def _arrive(grad: Tensor, token: Tensor, index: int) -> Tensor:
    mark = mark_of(token)
    mark.arrived[index], mark.given = grad, None
    return torch.empty(0, device="cpu")


def _functionalized(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    def plain(tensor: Tensor) -> Tensor:
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)

    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(functionalize):
        dense = plain(grad)
        if 0 in dense.stride():  # one number for many places, as from sum(): what a hook returns would not fit there
            dense = dense.clone(memory_format=torch.contiguous_format)
        out = torch.ops.sternway.state_give(dense, plain(token), index, [plain(each) for each in after])
    wrapped: Tensor = torch._to_functional_tensor(out)
    return wrapped


for _name, _kernel in [
    ("state_ask", lambda y, key: torch.empty(0, 0, 0)),
    ("state_tell", lambda y, key: torch.empty(0)),
    ("state_mark", _mark),
    ("state_arrive", _arrive),
    ("state_give", _give),
]:
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("state_give", _functionalized, "Functionalize")


# Trace.


@dataclass(slots=True)
class _Tracing:
    """What we know of the graph that Dynamo is tracing."""

    graph: int
    root: Tensor | None = None  # the key of the one state in it, as it came in
    marks: int = 0


_GRAPHS: dict[Any, int] = {}


def _tracing() -> _Tracing | None:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        code = output.root_tx.f_code
    except (ImportError, AttributeError):
        return None  # not under Dynamo, or one that is built differently: hooks work, these checks do not
    known: _Tracing | None = getattr(output, "_sternway_state", None)
    if known is None:
        known = output._sternway_state = _Tracing(_GRAPHS.setdefault(code, len(_GRAPHS) + 1))
    return known


@torch.library.register_fake("sternway::state_ask", lib=_LIBRARY)
def _(y: Tensor, key: Tensor) -> Tensor:
    tracing = _tracing()
    if tracing is None:
        return torch.empty(0, 0, 0)
    root = getattr(key, "_sternway_root", key)
    tracing.root = root if tracing.root is None else tracing.root
    came_from = getattr(y, "_sternway_mark", (None, 0))
    back = tracing.marks - came_from[1] + 1 if came_from[0] is root else 0
    return torch.empty(tracing.graph, int(tracing.root is not root), back)


@torch.library.register_fake("sternway::state_tell", lib=_LIBRARY)
def _(y: Tensor, key: Tensor) -> Tensor:
    tracing = _tracing()
    if tracing is not None:
        tracing.marks += 1
        y._sternway_mark = (getattr(key, "_sternway_root", key), tracing.marks)  # type: ignore[attr-defined]  # a note of ours
    return torch.empty(0)


@torch.library.register_fake("sternway::state_mark", lib=_LIBRARY)
def _(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    following, token = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    following._sternway_root = getattr(key, "_sternway_root", key)  # type: ignore[attr-defined]  # a note of ours
    return following, token


@torch.library.register_fake("sternway::state_arrive", lib=_LIBRARY)
def _(grad: Tensor, token: Tensor, index: int) -> Tensor:
    return torch.empty(0, device="cpu")


@torch.library.register_fake("sternway::state_give", lib=_LIBRARY)
def _(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    return grad.view_as(grad)
