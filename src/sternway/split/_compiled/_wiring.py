"""How the values of a compiled backward go between its arguments, its halves and its outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    late: tuple[tuple[int, bool], ...]  # slots that W computes, in order; whether W gives two factors for it
    own: tuple[bool, ...]  # of the weight gradients, early then late: whether they share memory with nothing,
    likes: tuple[Like, ...]  # and what they are like
    slots: int
    parameter: int | None  # the place of some parameter among the backward's arguments
