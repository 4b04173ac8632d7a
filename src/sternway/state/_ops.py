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

Mistakes that are seen while tracing are raised when the graph runs (``refuse``), as the error that eager code raises:
raised in the trace, they would come out as Dynamo's.

``ask`` is a question to the tracer: its answer is a shape, which Dynamo knows while it traces, and its node is dead code
afterwards. It tells which graph is being traced, whether another state is in it, and whether a tensor came from an
earlier ``on_grad``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sternway.errors import EmptyStateError, StateError
from sternway.state._load import mark_of, wire_of
from sternway.state._run import run, run_together

LIBRARY = torch.library.Library("sternway", "FRAGMENT")
LIBRARY.define("state_ask(Tensor y, Tensor key) -> Tensor")
LIBRARY.define("state_tell(Tensor y, Tensor key) -> Tensor")
LIBRARY.define("state_mark(Tensor key, int graph, int refusal) -> (Tensor, Tensor)")
LIBRARY.define("state_refuse(Tensor key, int refusal) -> Tensor")
LIBRARY.define("state_arrive(Tensor grad, Tensor token, int index) -> Tensor")
LIBRARY.define("state_give(Tensor(a) grad, Tensor token, int index, Tensor[] after) -> Tensor(a)")

_FILL = "set values between the forward and its backward, and read them in a hook"
SECOND_STATE, NO_GRADIENT, READ, WRITTEN, MADE = range(1, 6)
_REFUSALS: dict[int, tuple[type[StateError], str, str, str]] = {
    SECOND_STATE: (
        StateError,
        "a compiled graph carries one state",
        "a second one in the same graph",
        "use one state for all of the graph's hooks, or compile the two parts apart",
    ),
    NO_GRADIENT: (
        StateError,
        "a gradient arrives only at a tensor that requires one",
        "on_grad of a tensor with requires_grad=False",
        "leave the hook out, or make an input or a parameter before it require gradients",
    ),
    READ: (EmptyStateError, "a state is empty in the forward", "a value read in compiled code", _FILL),
    WRITTEN: (StateError, "a state is filled after the forward", "a value set in compiled code", _FILL),
    MADE: (
        StateError,
        "a state is an input of the graph that it is used in",
        "one made in compiled code",
        "make it outside, and pass it in or close over it",
    ),
}


def _refuse(key: Tensor, refusal: int) -> Tensor:
    error, rule, got, fix = _REFUSALS[refusal]
    raise error(rule, got=got, fix=fix)


# Run.


def _mark(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    if refusal:
        _refuse(key, refusal)
    wire, number = wire_of(key)
    mark = wire.mark(number + 1, graph)
    return torch.tensor(mark.number, device="cpu"), mark.token()


def _give(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    mark = mark_of(token)
    return run_together(mark, grad, index) if after else run(mark, grad)


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
    ("state_refuse", _refuse),
    ("state_arrive", _arrive),
    ("state_give", _give),
]:
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
LIBRARY.impl("state_give", _functionalized, "Functionalize")


# Trace.


@dataclass(slots=True)
class _Tracing:
    """What we know of the graph that Dynamo is tracing."""

    graph: int
    root: Tensor | None = None  # the key of the one state in it, as it came in
    marks: int = 0


def _tracing() -> _Tracing | None:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        code = output.root_tx.f_code
    except (ImportError, AttributeError):
        return None  # not under Dynamo, or one that is built differently: hooks work, these checks do not
    known: _Tracing | None = getattr(output, "_sternway_state", None)
    if known is None:
        # The same number in every process, so that compiled graphs are found again in torch's cache.
        place = f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
        known = output._sternway_state = _Tracing(1 + zlib.crc32(place.encode()) % 2**31)
    return known


@torch.library.register_fake("sternway::state_ask", lib=LIBRARY)
def _(y: Tensor, key: Tensor) -> Tensor:
    tracing = _tracing()
    if tracing is None:
        return torch.empty(0, 0, 0)
    root = getattr(key, "_sternway_root", key)
    tracing.root = root if tracing.root is None else tracing.root
    came_from = getattr(y, "_sternway_mark", (None, 0))
    back = tracing.marks - came_from[1] + 1 if came_from[0] is root else 0
    return torch.empty(tracing.graph, int(tracing.root is not root), back)


@torch.library.register_fake("sternway::state_tell", lib=LIBRARY)
def _(y: Tensor, key: Tensor) -> Tensor:
    tracing = _tracing()
    if tracing is not None:
        tracing.marks += 1
        y._sternway_mark = (getattr(key, "_sternway_root", key), tracing.marks)  # type: ignore[attr-defined]  # a note of ours
    return torch.empty(0)


@torch.library.register_fake("sternway::state_mark", lib=LIBRARY)
def _(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    following, token = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    following._sternway_root = getattr(key, "_sternway_root", key)  # type: ignore[attr-defined]  # a note of ours
    return following, token


@torch.library.register_fake("sternway::state_refuse", lib=LIBRARY)
def _(key: Tensor, refusal: int) -> Tensor:
    return torch.empty_like(key)


@torch.library.register_fake("sternway::state_arrive", lib=LIBRARY)
def _(grad: Tensor, token: Tensor, index: int) -> Tensor:
    return torch.empty(0, device="cpu")


@torch.library.register_fake("sternway::state_give", lib=LIBRARY)
def _(grad: Tensor, token: Tensor, index: int, after: list[Tensor]) -> Tensor:
    return grad.view_as(grad)
