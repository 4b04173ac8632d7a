"""A compiled backward in two halves, as AOTAutograd calls it: I and W at once, or W left to a ``Pending``."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from sternway.split._compiled._block import Boxed, Waiting
from sternway.split._compiled._offer import take_offer
from sternway.split._compiled._report import CompiledGraphs
from sternway.split._compiled._wiring import Wiring

_count = itertools.count()


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
                outputs = iter(self._w(held))
                for slot, is_product in wiring.late:
                    results[slot] = next(outputs) @ next(outputs) if is_product else next(outputs)
            return results
        marks = self._marks or self._make_marks()
        for slot, mark in marks:
            results[slot] = mark
        early = [found[index] for _, index in wiring.early]
        offer.accept(Waiting(self._w, held, early, wiring), self._places, len(early))
        return results

    def see(self, parameter: Tensor) -> None:
        """Note that it ran with this parameter: one compiled graph serves many modules."""
        key, seen = id(parameter), self.seen
        seen[key] = weakref.ref(parameter, lambda _: seen.pop(key, None))

    def _make_marks(self) -> list[tuple[int, Tensor]]:
        """By slot, one number seen in the gradient's shape: the engine looks at it before we take it back."""
        slots = [*(slot for slot, _ in self._wiring.early), *(slot for slot, _ in self._wiring.late)]
        for slot, like in zip(slots, self._wiring.likes, strict=True):
            self._marks.append((slot, torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)))
        self._places = {id(mark): place for place, (_, mark) in enumerate(self._marks)}
        return self._marks
