"""What a forward passes to its backward, and what keeps it alive.

    BackwardState ──▶ Wire ──▶ current Load ◀── Mark ◀── the token that the forward saves
     the user's        │          values          fns       one for each on_grad
                       └── key, added: all that compiled code uses

A *mark* is one run of one ``on_grad``; compiled code knows it by a number only. A *load* holds the values that are set
for all marks made since the last time. The *token* is a tensor of one integer, the mark's number, and its memory owns
the mark. The graph saves the token, and so keeps the mark, the wire and the values; they are freed with the graph. A
mark has no reference to its token, so there is no reference cycle through C++ that would never be freed.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sternway._torch.autograd import current_graph_task
from sternway._torch.captures import current_capture, is_preparing
from sternway.errors import StateError

Hook = Callable[[Any], Any]
Added = tuple[()] | tuple[Tensor, Hook, Any]  # key, function, what was added before

_NUMBERS = itertools.count(1)
_MARKS_PER_WIRE = 1 << 32
_WIRES: WeakValueDictionary[int, Wire] = WeakValueDictionary()
_RUNNING = threading.local()


class Load:
    """The values for the forwards since the state was last filled or used in a backward."""

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.values: dict[str, Any] = {}
        self.phase = "forward"  # then "filled", then "backward"


class Mark:
    """One run of one ``on_grad``: the functions to call when its gradient arrives."""

    def __init__(self, number: int, wire: Wire, load: Load) -> None:
        self.number, self.wire, self.load = number, wire, load
        self.fns: list[Hook] = []
        self.filled = False  # whether the forward has passed its functions on
        self.arrived: dict[int, Tensor] = {}  # gradients that are shown together
        self.given: dict[int, Tensor] | None = None  # what the functions returned for them

    def token(self) -> Tensor:
        """The mark's number, as a tensor whose memory keeps the mark alive."""
        memory = _Memory(struct.pack("q", self.number))
        memory.mark = self
        return torch.frombuffer(memory, dtype=torch.int64).reshape(())


class CapturedMark(Mark):
    """Of a forward that is captured as a CUDA graph, or tried before that; each replay makes a mark of its own.

    Its functions are never called with the gradients of the capture, which mean nothing.
    """

    def __init__(self, number: int, wire: Wire) -> None:
        super().__init__(number, wire, Load(0))
        if (capture := current_capture()) is not None:
            capture.places.add(self, lambda: wire.add(self.fns))


class _Memory(bytearray):
    mark: Mark


class Wire:
    """Connects a state and its graphs. Compiled code reads and writes ``key`` and ``added``, and nothing else."""

    def __init__(self) -> None:
        self.key = torch.zeros((), dtype=torch.int64, device="cpu")  # the number of the latest mark
        self.added: Added = ()  # functions from forwards, not yet with their marks; latest first
        if torch.compiler.is_dynamo_compiling():
            return  # to be refused
        self.number = next(_NUMBERS)
        self.key.fill_(self.number * _MARKS_PER_WIRE)
        self.load: Load | None = None
        self.marks: WeakValueDictionary[int, Mark] = WeakValueDictionary()
        self.closed = False
        self.lock = threading.RLock()
        _WIRES[self.number] = self

    def mark(self, number: int, graph: int) -> Mark:
        """The mark of this number, made if it is new. A pure function of the number, so that it may run again."""
        with self.lock:
            self._check_open()
            self.settle()
            known = self.marks.get(number)
            if known is not None:
                return known
            mark = CapturedMark(number, self) if is_preparing() else Mark(number, self, self._open(graph))
            self.marks[number] = mark
            return mark

    def add(self, fns: Sequence[Hook]) -> Mark:
        """A new mark with these functions."""
        with self.lock:
            mark = self.mark(int(self.key) + 1, 0)
            self.key = self.key + 1
            mark.fns, mark.filled = list(fns), True
            return mark

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("a closed state cannot be used", got="a use after close()", fix="make another one")

    def _open(self, graph: int) -> Load:
        load = self.load
        if load is None or (load.phase != "forward" and current_graph_task() == -1):
            load = self.load = Load(graph)  # but not when a checkpoint runs its forward again in the backward
        elif graph and load.graph and graph != load.graph and load.phase == "forward":
            raise StateError(
                "a state cannot be used in two compiled graphs",
                got="a second one before the state was filled or used in a backward",
                fix="make a state for each compiled function; if there is a graph break between the two, remove it",
            )
        load.graph = load.graph or graph
        return load

    def fill(self) -> Load:
        """The load whose values are set now."""
        with self.lock:
            self._check_open()
            self.settle()
            if self.load is None:
                self.load = Load(0)
            if self.load.phase == "forward":
                self.load.phase = "filled"
            return self.load

    def close(self) -> None:
        """Free everything."""
        with self.lock:
            self.closed, self.added, self.load = True, (), None
            for mark in list(self.marks.values()):
                mark.fns, mark.load = [], Load(0)

    def describe(self) -> str:
        """The wire's state in words."""
        self.settle()
        if self.closed:
            return "closed"
        values = sorted(self.load.values) if self.load is not None else []
        return f"{len(self.marks)} places in live graphs; values: {', '.join(values) or 'none'}"

    def settle(self) -> None:
        """Give the functions that forwards have passed on to their marks."""
        with self.lock:
            added, self.added = self.added, ()
            entries = []
            while added:
                key, fn, added = added
                entries.append((int(key), fn))
            for number, fn in reversed(entries):
                mark = self.marks.get(number)
                if mark is not None:  # else the graph is gone, and no gradient will arrive
                    mark.fns.append(fn)
                    mark.filled = True


def wire_of(key: Tensor) -> tuple[Wire, int]:
    """The wire that a key or a token belongs to, and the number it holds."""
    number = int(key)
    wire = _WIRES.get(number // _MARKS_PER_WIRE)
    if wire is None:
        raise _gone("a state that was freed")
    return wire, number


def mark_of(token: Tensor) -> Mark:
    """The mark that a token stands for, with its functions."""
    wire, number = wire_of(token)
    wire.settle()
    mark = wire.marks.get(number)
    if mark is None or not (mark.filled or wire.closed):
        raise _gone("a state that was freed with its forward: what the forward saved was copied, or computed again")
    return mark


def _gone(got: str) -> StateError:
    return StateError(
        "the state that this backward needs is gone",
        got=got,
        fix="close() a state after its last backward; keep on_grad out of what is recomputed or copied",
    )


def running(wire: Wire) -> Load | None:
    """The load of the forward whose backward is calling a hook in this thread, if it is one of this wire's."""
    load: Load | None = getattr(_RUNNING, "loads", {}).get(wire.number)
    return load


class Running:
    """A block in which hooks of one mark run: values are read from its forward's load."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def __enter__(self) -> None:
        if self.mark.wire.closed:
            raise _gone("a state that was closed")
        if current_capture() is not None:
            raise StateError(
                "hooks of a state run in Python, which a CUDA graph does not",
                got="on_grad of another forward, in a backward that split.capture, or cuda_graphs=True, captures",
                fix="leave that module out of the capture",
            )
        self.before = getattr(_RUNNING, "loads", {})
        _RUNNING.loads = {**self.before, self.mark.wire.number: self.mark.load}
        self.mark.load.phase = "backward"

    def __exit__(self, *exc: object) -> None:
        _RUNNING.loads = self.before
