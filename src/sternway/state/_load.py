"""What one forward hands to its backward: the records, and who keeps them alive.

    BackwardState ──▶ Wire ──▶ current Load ◀── Mark ◀── the token that the forward saves
     the user's        │          values          fns       one for each on_grad
                       └── key, added: all that compiled code touches

A *mark* is one run of one ``on_grad``; it is known by a number, and compiled code knows nothing else of it. A *load* is
what the marks share that were made between two fillings: the values. The *token* is a tensor of one integer, the mark's
number; its memory owns the mark. Saving a token in the graph saves the mark, the wire, the values; when the graph is
freed, so are they. Nothing leads from a mark to its token, so there is no ring through C++ that would never be freed.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sternway.errors import StateError

Hook = Callable[[Any], Any]
Added = tuple[()] | tuple[Tensor, Hook, Any]  # key, function, what was added before

_NUMBERS = itertools.count(1)
_MARKS_PER_WIRE = 1 << 32
_WIRES: WeakValueDictionary[int, Wire] = WeakValueDictionary()
_RUNNING = threading.local()


class Load:
    """The values of the calls that were made since the state was last filled or gone back through."""

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.values: dict[str, Any] = {}
        self.phase = "forward"  # then "filled", then "backward"


class Mark:
    """One run of one ``on_grad``: which functions to call when its gradient comes."""

    def __init__(self, number: int, wire: Wire, load: Load) -> None:
        self.number, self.wire, self.load = number, wire, load
        self.fns: list[Hook] = []
        self.filled = False  # whether the forward has handed its functions over
        self.arrived: dict[int, Tensor] = {}  # of several gradients that are shown together
        self.given: dict[int, Tensor] | None = None  # what the functions returned for them

    def token(self) -> Tensor:
        """The mark's number as a tensor whose memory keeps the mark."""
        memory = _Memory(struct.pack("q", self.number))
        memory.mark = self
        return torch.frombuffer(memory, dtype=torch.int64).reshape(())


class _Memory(bytearray):
    mark: Mark


class Wire:
    """Between a state and its graphs. Compiled code reads and writes ``key`` and ``added``, and nothing else."""

    def __init__(self) -> None:
        self.key = torch.zeros((), dtype=torch.int64, device="cpu")  # the number of the latest mark
        self.added: Added = ()  # functions that a forward handed over, not yet settled; latest first
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
        """The mark of this number; made if it is new. A pure function of the number, so that it may run again."""
        with self.lock:
            self._check_open()
            self.settle()
            known = self.marks.get(number)
            if known is not None:
                return known
            mark = self.marks[number] = Mark(number, self, self._open(graph))
            return mark

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("a closed state carries nothing more", got="a use after close()", fix="make another")

    def _open(self, graph: int) -> Load:
        load = self.load
        if load is None or (load.phase != "forward" and torch._C._current_graph_task_id() == -1):
            load = self.load = Load(graph)  # a checkpoint that runs its forward again in the backward opens none
        elif graph and load.graph and graph != load.graph and load.phase == "forward":
            raise StateError(
                "a state rides in one graph",
                got="a second compiled graph that uses it before it was filled or gone back through",
                fix="make a state for each compiled function; on both sides of a graph break, mend the break",
            )
        load.graph = load.graph or graph
        return load

    def fill(self) -> Load:
        """The load that values go to now."""
        with self.lock:
            self._check_open()
            self.settle()
            if self.load is None:
                self.load = Load(0)
            if self.load.phase == "forward":
                self.load.phase = "filled"
            return self.load

    def close(self) -> None:
        """Let everything go."""
        with self.lock:
            self.closed, self.added, self.load = True, (), None
            for mark in list(self.marks.values()):
                mark.fns, mark.load = [], Load(0)

    def describe(self) -> str:
        """Where the wire stands, in words."""
        self.settle()
        if self.closed:
            return "closed"
        values = sorted(self.load.values) if self.load is not None else []
        return f"{len(self.marks)} places in graphs that live; values: {', '.join(values) or 'none'}"

    def settle(self) -> None:
        """Put the functions that forwards have handed over where their marks are."""
        with self.lock:
            added, self.added = self.added, ()
            entries = []
            while added:
                key, fn, added = added
                entries.append((int(key), fn))
            for number, fn in reversed(entries):
                mark = self.marks.get(number)
                if mark is not None:  # else the graph is gone, and nothing will come
                    mark.fns.append(fn)
                    mark.filled = True


def wire_of(key: Tensor) -> tuple[Wire, int]:
    """The wire that a key or a token belongs to, and the number it holds."""
    number = int(key)
    wire = _WIRES.get(number // _MARKS_PER_WIRE)
    if wire is None:
        raise _gone("a state that is no more")
    return wire, number


def mark_of(token: Tensor) -> Mark:
    """The mark that a token stands for, with its functions."""
    wire, number = wire_of(token)
    wire.settle()
    mark = wire.marks.get(number)
    if mark is None or not (mark.filled or wire.closed):
        raise _gone("a state that did not outlive its forward: what the forward saved was copied, or computed again")
    return mark


def _gone(got: str) -> StateError:
    return StateError(
        "a backward needs the state that its forward saved",
        got=got,
        fix="close() a state after its last backward; keep on_grad out of what is recomputed or copied",
    )


def running(wire: Wire) -> Load | None:
    """The load of the call whose backward is calling a hook in this thread, if it is one of this wire's."""
    load: Load | None = getattr(_RUNNING, "loads", {}).get(wire.number)
    return load


class Running:
    """While a hook runs: whose backward it is."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def __enter__(self) -> None:
        if self.mark.wire.closed:
            raise _gone("a state that was closed")
        self.before = getattr(_RUNNING, "loads", {})
        _RUNNING.loads = {**self.before, self.mark.wire.number: self.mark.load}
        self.mark.load.phase = "backward"

    def __exit__(self, *exc: object) -> None:
        _RUNNING.loads = self.before
