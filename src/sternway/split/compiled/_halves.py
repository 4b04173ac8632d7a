"""A compiled backward in two halves, as AOTAutograd calls it: I and W at once, or W left to a ``Pending``."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway._torch.compile import boxed
from sternway.split.compiled._offer import take_offer
from sternway.split.compiled._report import CompiledGraphs
from sternway.split.compiled._work import Boxed, CompiledWork

_count = itertools.count()
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What the engine checks of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Wiring:
    """How values go between the backward's arguments, its halves and its results, by index.

    A slot is an index among the backward's results. Weight gradients come in the order early, late.
    """

    i_takes: tuple[int, ...]  # I's inputs, among the backward's arguments
    w_takes: tuple[int, ...]  # W's inputs: first some of the backward's arguments,
    w_holds: tuple[int, ...]  # then what I computed, among I's results
    from_i: tuple[tuple[int, int], ...]  # (slot, index among I's results), but for weight gradients
    early: tuple[tuple[int, int], ...]  # the same, for weight gradients that I computes
    late: tuple[int, ...]  # slots of weight gradients that W computes, in W's order
    is_product: tuple[bool, ...]  # for each of those, whether W returns two factors of it
    owned: tuple[bool, ...]  # for each weight gradient, whether it shares memory with nothing,
    specs: tuple[GradientSpec, ...]  # and its shape, dtype and device
    slots: int
    parameter: int | None  # the index of some parameter among the backward's arguments


@dataclass(frozen=True, slots=True)
class Marks:
    """What is returned in the place of gradients that wait."""

    by_slot: list[tuple[int, Tensor]]
    numbers: dict[int, int]  # by a mark's id, the number of the gradient that it stands for


class Halves:
    """The backward of one compiled region."""

    def __init__(self, i: Boxed, w: Boxed | None, wiring: Wiring, report: CompiledGraphs) -> None:
        self._i, self._w, self._wiring = i, w, wiring
        self.report = report
        self.order = next(_count)
        self.seen: dict[int, weakref.ref[Tensor]] = {}  # parameters that it ran with, by id
        self._marks: Marks | None = None

    def boxed(self) -> Boxed:
        """As AOTAutograd takes it."""

        def backward(arguments: list[Any]) -> list[Any]:
            return self(arguments)

        return boxed(backward)

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
                for slot, is_product in zip(wiring.late, wiring.is_product, strict=True):
                    results[slot] = next(outputs) @ next(outputs) if is_product else next(outputs)
            return results
        marks = self._marks or self._make_marks()
        for slot, mark in marks.by_slot:
            results[slot] = mark
        computed = [found[index] for _, index in wiring.early]
        offer.accept(CompiledWork(self._w, held, computed, wiring.is_product, wiring.owned), marks.numbers)
        return results

    def see(self, parameter: Tensor) -> None:
        """Note that it ran with this parameter: one compiled graph may serve many modules."""
        key, seen = id(parameter), self.seen
        seen[key] = weakref.ref(parameter, lambda _: seen.pop(key, None))

    def _make_marks(self) -> Marks:
        """For each slot of a weight gradient, one number expanded to the gradient's shape, which the engine checks."""
        with _making:  # the same for all threads, since the engine gives back what is returned to it
            if self._marks is None:
                slots = [*(slot for slot, _ in self._wiring.early), *self._wiring.late]
                made = [
                    torch.empty((), dtype=spec.dtype, device=spec.device).expand(spec.shape)
                    for spec in self._wiring.specs
                ]
                numbers = {id(mark): number for number, mark in enumerate(made)}
                self._marks = Marks(list(zip(slots, made, strict=True)), numbers)
            return self._marks
