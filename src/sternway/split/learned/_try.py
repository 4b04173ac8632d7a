"""A trial: whether a Function's backward can be called in two parts, found out on the tensors of a real call.

        whole   the real call, whose gradients go on; if it had an effect that can be seen, that is all
        guarded the whole call again, the inputs' part and the weights' part, each stopped before it has an effect
        free    the three of them again, timed

A Function can be split if each part returns gradients for its own inputs alone, and if all of them are equal to those
of the whole call. It gains if the two parts together take little longer than the whole, and the weights' part takes a
share of it that is worth waiting for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sternway._storage import storage_bytes
from sternway._torch.tensors import ORDINARY
from sternway.split.learned._call import BackwardCall, Flags, Grads
from sternway.split.learned._effects import SideEffectError, Surroundings, guarded

clock = time.perf_counter
ROUNDS = 3
MOST_TWICE = 1.25
"""I and W together may take this many times as long as the whole call; what both compute is computed twice."""
LEAST_SHARE = 0.1
"""W takes at least this share of the whole call, or it is not worth what it holds."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of the whole backward, of its part for inputs and of its part for weights."""

    whole: float
    inputs: float
    weights: float

    @property
    def gains(self) -> bool:
        most = MOST_TWICE * self.whole
        return self.inputs + self.weights <= most and self.weights >= LEAST_SHARE * self.whole


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What a trial found.

    Attributes:
        splits: whether the Function is to be split; None if the call did not tell.
        why: the reason why not.
        exact: whether the gradients were equal in every bit.
        seconds: how long it takes, if that was measured.
        held: bytes that wait until W.
        called: whether the backward was called more often than it would have been.
    """

    splits: bool | None
    why: str = ""
    exact: bool = True
    seconds: PartTimes | None = None
    held: int = 0
    called: bool = True


def parts_of(needs: Flags, waiting: frozenset[int]) -> tuple[Flags, Flags]:
    """The flags of the inputs' part and of the weights' part."""
    inputs = tuple([need and index not in waiting for index, need in enumerate(needs)])
    return inputs, tuple([need and index in waiting for index, need in enumerate(needs)])


def returns_only(grads: Grads, flags: Flags) -> bool:
    """Whether there is a gradient where a flag is set, and nowhere else."""
    return [grad is not None for grad in grads] == list(flags)


def attempt(
    call: BackwardCall,
    whole: Grads,
    waiting: frozenset[int],
    surroundings: Surroundings,
    *,
    exact: bool,
    timed: bool,
) -> TrialOutcome:
    """Try both ways to make a call.

    Args:
        call: the call.
        whole: what it returned when the engine made it.
        waiting: the inputs whose gradients are to wait.
        surroundings: what was around it before.
        exact: whether all gradients must be equal in every bit, or only within rounding.
        timed: whether to measure if it gains.
    """
    if not all(type(grad) in ORDINARY and grad.layout is torch.strided for grad in whole if grad is not None):
        return TrialOutcome(False, "returns a gradient that is no dense tensor", called=False)
    if why := _not_told(whole, call.needs):
        return TrialOutcome(None, why, called=False)
    flags = (call.needs, *parts_of(call.needs, waiting))
    inputs, weights = flags[1:]
    expected = (whole, _choose(whole, inputs), _choose(whole, weights))
    names = ("again", "for its inputs alone", "for its weights alone")

    def run() -> tuple[str, bool, list[float]]:
        equal, times = True, []
        for flag, wanted, name in zip(flags, expected, names, strict=True):
            seconds, got = _timed(call, flag)
            times.append(seconds)
            if flag is not call.needs and not returns_only(got, flag):
                return "does not do as needs_input_grad says", False, times
            if not _same(got, wanted, exact):
                faults = "is not deterministic" if flag is call.needs else f"computes other gradients {name}"
                return faults, False, times
            equal = equal and _same(got, wanted, exact=True)
        return "", equal, times

    try:
        with guarded():
            why, equal, _ = run()
        rounds: list[list[float]] = []
        while not why and len(rounds) < (ROUNDS if timed else 1):
            why, same, times = run()
            equal = equal and same
            rounds.append(times)
    except SideEffectError as effect:
        return TrialOutcome(False, str(effect))
    except Exception as error:
        return TrialOutcome(False, f"raises {type(error).__name__} in a trial")
    finally:
        surroundings.restore_random()
    if changed := surroundings.change() or surroundings.change_of_state():
        return TrialOutcome(False, changed)
    if why:
        return TrialOutcome(False, why)
    apart = [tensor for tensor in call.tensors() if isinstance(tensor, torch.nn.Parameter)]
    held = storage_bytes(call.tensors(), apart)
    if not timed:
        return TrialOutcome(True, exact=equal, held=held)
    seconds = PartTimes(*[min(column) for column in zip(*rounds, strict=True)])
    return TrialOutcome(seconds.gains, "" if seconds.gains else "gains nothing", equal, seconds, held)


def _not_told(whole: Grads, needs: Flags) -> str:
    """Why gradients say nothing about a Function; empty if they do."""
    wanted = [grad for grad, need in zip(whole, needs, strict=True) if need]
    if any(grad is None for grad in wanted):
        return "left out a gradient that was needed"
    for grad in wanted:
        assert grad is not None
        if not grad.numel() or not bool(torch.isfinite(value := _readable(grad)).all()) or not bool(value.any()):
            return "all gradients so far were zero, empty or not finite"
    return ""


def _choose(grads: Grads, flags: Flags) -> Grads:
    return tuple([grad if flag else None for grad, flag in zip(grads, flags, strict=True)])


def _same(got: Grads, wanted: Grads, exact: bool) -> bool:
    for mine, theirs in zip(got, wanted, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or mine.device != theirs.device:
            return False
        if torch.equal(mine, theirs):
            continue
        if exact or not _is_close(mine, theirs):
            return False
    return True


def _is_close(mine: Tensor, theirs: Tensor) -> bool:
    try:
        torch.testing.assert_close(mine, theirs)
    except AssertionError:
        return False
    return True


def _readable(grad: Tensor) -> Tensor:
    """A gradient in a dtype that has all operators."""
    return grad.float() if grad.is_floating_point() and grad.element_size() < 2 else grad


def _timed(call: BackwardCall, flags: Flags) -> tuple[float, Grads]:
    _wait(call)
    start = clock()
    returned = call.run(flags)
    _wait(call)
    return clock() - start, returned


def _wait(call: BackwardCall) -> None:
    """Wait until the device has done what it was given."""
    if call.device is not None and call.device.type == "cuda":
        torch.cuda.synchronize(call.device)
