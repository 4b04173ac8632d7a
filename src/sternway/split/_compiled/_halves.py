"""A compiled backward in two halves, as AOTAutograd calls it: I and W at once, or W left to a ``Pending``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway.split._compiled._offer import take_offer
from sternway.split._compiled._report import CompiledGraphs
from sternway.split._later import Later

_count = itertools.count()
Boxed = Callable[[list[Any]], Sequence[Any]]  # a compiled graph: it empties the list as it goes


@dataclass(frozen=True, slots=True)
class Like:
    """What the engine checks of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Wiring:
    """Where each half's values come from, and where they go, by index."""

    i_takes: tuple[int, ...]  # I's inputs, among the backward's arguments
    w_takes: tuple[int, ...]  # W's inputs: the backward's arguments first,
    w_holds: tuple[int, ...]  # then what I computed, among I's outputs
    from_i: tuple[tuple[int, int], ...]  # (slot of the backward's outputs, index among I's outputs)
    early: tuple[tuple[int, int], ...]  # the same, for weight gradients that I computes
    late: tuple[tuple[int, int], ...]  # (slot, index among W's outputs)
    own: frozenset[int]  # slots whose gradient shares memory with nothing
    likes: tuple[Like, ...]  # of the weight gradients, early and late in their order
    slots: int
    parameter: int | None  # the place of some parameter among the backward's arguments


class Halves:
    """The backward of one compiled graph."""

    def __init__(self, i: Boxed, w: Boxed | None, wiring: Wiring, report: CompiledGraphs) -> None:
        self._i, self._w, self._wiring = i, w, wiring
        self.report = report
        self.order = next(_count)
        self.seen: dict[int, weakref.ref[Tensor]] = {}  # parameters that it ran with, by id
        self._marks: dict[int, Tensor] = {}  # by slot

    def boxed(self) -> Boxed:
        """As AOTAutograd wants it: a function that says it empties its argument."""

        def backward(arguments: list[Any]) -> list[Any]:
            return self(arguments)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def __call__(self, arguments: list[Any]) -> list[Any]:
        wiring = self._wiring
        offer = take_offer()
        if wiring.parameter is not None and id(arguments[wiring.parameter]) not in self.seen:
            self.see(arguments[wiring.parameter])
        held = [arguments[index] for index in wiring.w_takes]
        given = [arguments[index] for index in wiring.i_takes]
        arguments.clear()
        found = self._i(given)
        results: list[Any] = [None] * wiring.slots
        for slot, index in wiring.from_i:
            results[slot] = found[index]
        held += [found[index] for index in wiring.w_holds]
        if offer is None:
            for slot, index in wiring.early:
                results[slot] = found[index]
            del found
            if self._w is not None:
                grads = self._w(held)
                for slot, index in wiring.late:
                    results[slot] = grads[index]
            return results
        marks = self._marks or self._make_marks()
        laters: dict[int, Later] = {}
        for slot, index in wiring.early:
            results[slot] = mark = marks[slot]
            laters[id(mark)] = Early(found[index], slot in wiring.own)
        if self._w is not None:
            waiting = Waiting(self._w, held)
            for slot, index in wiring.late:
                results[slot] = mark = marks[slot]
                laters[id(mark)] = Late(waiting, index, slot in wiring.own)
        offer.accept(laters)
        return results

    def see(self, parameter: Tensor) -> None:
        """Note that it ran with this parameter: one compiled graph serves many modules."""
        key, seen = id(parameter), self.seen
        seen[key] = weakref.ref(parameter, lambda _: seen.pop(key, None))

    def _make_marks(self) -> dict[int, Tensor]:
        """One number each, seen in the gradient's shape: the engine looks at them before we take them back."""
        slots = [slot for slot, _ in (*self._wiring.early, *self._wiring.late)]
        for slot, like in zip(slots, self._wiring.likes, strict=True):
            self._marks[slot] = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
        return self._marks


class Waiting:
    """One W that waits: its inputs until it has run, then those of its gradients that nobody has taken yet."""

    __slots__ = ("_grads", "_inputs", "_versions", "_w", "kept")

    def __init__(self, w: Boxed, inputs: list[Any]) -> None:
        # A saved input of the graph comes back with its history; holding that would hold the graph before it.
        inputs = [value.detach() if isinstance(value, Tensor) and value.requires_grad else value for value in inputs]
        self._w, self._inputs = w, inputs
        self.kept = tuple([value for value in inputs if isinstance(value, Tensor)])
        self._versions = [tensor._version for tensor in self.kept]
        self._grads: list[Tensor | None] | None = None

    def was_changed(self) -> bool:
        return self._grads is None and self._versions != [tensor._version for tensor in self.kept]

    def take(self, index: int) -> Tensor:
        """One of W's gradients; the first asked for computes them all."""
        if self._grads is None:
            inputs, self._inputs, self.kept = self._inputs, [], ()
            with torch.no_grad(), torch._C._DisableAutocast():
                self._grads = list(self._w(inputs))
        grad, self._grads[index] = self._grads[index], None
        assert grad is not None  # each is taken once
        return grad


class Late(Later):
    """One gradient of a compiled W."""

    __slots__ = ("_index", "_waiting", "own")

    def __init__(self, waiting: Waiting, index: int, own: bool) -> None:
        self._waiting, self._index, self.own = waiting, index, own

    @property
    def kept(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # read only here: it empties when W has run
        return self._waiting.kept

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        return self._waiting.take(self._index)

    def was_changed(self) -> bool:
        return self._waiting.was_changed()


class Early(Later):
    """A weight gradient that a compiled I has computed already."""

    __slots__ = ("own",)
    is_computed = True

    def __init__(self, grad: Tensor, own: bool) -> None:
        self.kept, self.own = (grad,), own
        self._versions = [grad._version]

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        return self.kept[0]
