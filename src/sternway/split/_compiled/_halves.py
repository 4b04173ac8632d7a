"""A compiled backward in two halves, as AOTAutograd calls it: I and W at once, or W left to a ``Pending``."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway.split._compiled._block import Boxed, Waiting
from sternway.split._compiled._offer import take_offer
from sternway.split._compiled._report import CompiledGraphs

_count = itertools.count()


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
    late: tuple[int, ...]  # the slots of W's outputs, in their order
    own: tuple[bool, ...]  # of the weight gradients, early then late: whether they share memory with nothing,
    likes: tuple[Like, ...]  # and what they are like
    slots: int
    parameter: int | None  # the place of some parameter among the backward's arguments


class Halves:
    """The backward of one compiled graph."""

    def __init__(self, i: Boxed, w: Boxed | None, wiring: Wiring, report: CompiledGraphs) -> None:
        self._i, self._w, self._wiring = i, w, wiring
        self.report = report
        self.order = next(_count)
        self.seen: dict[int, weakref.ref[Tensor]] = {}  # parameters that it ran with, by id
        self._marks: list[tuple[int, Tensor]] = []
        self._places: dict[int, int] = {}  # of the marks, by id

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
                for slot, grad in zip(wiring.late, self._w(held), strict=True):
                    results[slot] = grad
            return results
        marks = self._marks or self._make_marks()
        for slot, mark in marks:
            results[slot] = mark
        early = [found[index] for _, index in wiring.early]
        offer.accept(Waiting(self._w, held, early, wiring.own), self._places, len(early))
        return results

    def see(self, parameter: Tensor) -> None:
        """Note that it ran with this parameter: one compiled graph serves many modules."""
        key, seen = id(parameter), self.seen
        seen[key] = weakref.ref(parameter, lambda _: seen.pop(key, None))

    def _make_marks(self) -> list[tuple[int, Tensor]]:
        """By slot, one number seen in the gradient's shape: the engine looks at it before we take it back."""
        slots = [*(slot for slot, _ in self._wiring.early), *self._wiring.late]
        for slot, like in zip(slots, self._wiring.likes, strict=True):
            self._marks.append((slot, torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)))
        self._places = {id(mark): place for place, (_, mark) in enumerate(self._marks)}
        return self._marks
