"""Which Functions may be tried, and what trials have found: one table for the process, by Function.

A verdict holds for calls that look alike (``BackwardCall.form``). A Function that was split in one form is tried again
in the next, up to a number; one that was found out not to do as it should stays whole in all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch.autograd import Function

from sternway._bytes import show_bytes
from sternway._torch import require
from sternway._torch.functions import has_plain_call, is_users
from sternway.errors import SplitError
from sternway.split.learned._call import Flags
from sternway.split.learned._try import Outcome, PartTimes

MOST_FORMS = 16


@dataclass(eq=False, slots=True)
class LearnedKind:
    """What is known of a Function that is called for these inputs, some of which may wait."""

    needs: Flags
    waiting: frozenset[int]
    verdict: Literal["split", "whole", "untried"] = "untried"
    why: str = "not tried: see split.learn"
    forms: dict[Hashable, bool] = field(default_factory=dict)  # that it was tried in: whether it was equal in every bit
    trials: int = 0
    asked: int = 0  # how often a trial might have been made since one has told something
    calls: int = 0
    seconds: PartTimes | None = None
    held: int = 0

    def splits(self, form: Hashable, exact: bool) -> bool:
        """Whether calls that look like this one are split."""
        return self.verdict == "split" and (self.forms.get(form) or (form in self.forms and not exact))

    def may_try(self, form: Hashable) -> bool:
        """Whether to try a call that looks like this one: more and more seldom, while trials tell nothing."""
        if self.verdict == "whole" or form in self.forms or len(self.forms) >= MOST_FORMS:
            return False
        self.asked += 1
        return not self.asked & (self.asked - 1)

    def note(self, form: Hashable, outcome: Outcome) -> None:
        """Keep what a trial has found."""
        self.trials += 1
        if outcome.splits:
            self.verdict, self.why, self.asked = "split", "", 0
            self.forms[form] = outcome.exact
            self.held = max(self.held, outcome.held)
            self.seconds = outcome.seconds or self.seconds
        elif outcome.splits is False:
            self.stay_whole(outcome.why)
            self.seconds = outcome.seconds or self.seconds
        else:
            self.why = outcome.why

    def stay_whole(self, why: str) -> None:
        self.verdict, self.why = "whole", why
        self.forms.clear()


_CHOSEN: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()  # by class: whether to the bit; None: not at all
_KINDS: WeakKeyDictionary[Any, dict[tuple[Flags, frozenset[int]], LearnedKind]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def exactness(function: type) -> bool | None:
    """Whether a Function must be equal in every bit to be split; None if it is not to be tried at all."""
    for base in function.__mro__:
        if base in _CHOSEN:
            chosen = _CHOSEN[base]
            return chosen if base is function or is_users(function) else None
    return None


def meet(function: type) -> None:
    """Note that a Function was met."""
    with _LOCK:
        _KINDS.setdefault(function, {})


def was_met(function: type) -> bool:
    """Whether a Function was met before."""
    return function in _KINDS


def kind_of(function: type, needs: Flags, waiting: frozenset[int]) -> LearnedKind:
    """What is known of a Function."""
    with _LOCK:
        known = _KINDS.setdefault(function, {})
        kind = known.get((needs, waiting))
        if kind is None:
            kind = known[needs, waiting] = LearnedKind(needs, waiting)
            if not has_plain_call(function):
                kind.stay_whole("its backward takes what it needs out of ctx, once")
        return kind


def learn(*functions: type[Function], exact: bool = True) -> None:
    """Let the split find out whether the backward of custom Functions can be called in two parts.

    The first time that ``backward_input`` meets one of them, its backward is called whole, as always. Then it is called
    again on the same tensors, for its inputs alone and for its weights alone, by ``ctx.needs_input_grad``. If the
    gradients are those of the whole call, and the two parts do not take much longer, it is split from then on: the
    weights' part waits for W. ``split.kinds()`` shows what was found.

    In a trial a backward is called several times. It must have no effect beside the gradients that it returns; one
    that is noticed stays whole. So nothing is tried unless it is named here.

    Example:
        >>> from sternway import split
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, weight):
        ...         ctx.save_for_backward(x, weight)
        ...         return x @ weight
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, weight = ctx.saved_tensors
        ...         of_x, of_weight = ctx.needs_input_grad
        ...         return grad @ weight.t() if of_x else None, x.t() @ grad if of_weight else None
        >>> split.learn(Scale)
        >>> split.unlearn(Scale)

    Args:
        functions: the classes, and with them their subclasses. ``torch.autograd.Function`` is every Function that is
            not torch's own.
        exact: whether both parts must give the whole call's gradients in every bit. Otherwise they may differ within
            rounding, as ``torch.testing.assert_close`` has it; ``backward_input(exact=True)`` then does not split it.

    Raises:
        SplitError: something else than a class of Functions was passed.
    """
    require("split.learned")
    _choose(functions, exact)


def unlearn(*functions: type[Function]) -> None:
    """Let the backward of Functions be called whole, also of those that ``learn`` named a base of; forget trials.

    Example:
        >>> from sternway import split
        >>> split.unlearn(torch.autograd.Function)
    """
    _choose(functions, None)


def _choose(functions: tuple[Any, ...], exact: bool | None) -> None:
    for function in functions:
        SplitError.unless(
            isinstance(function, type) and issubclass(function, Function),
            "learn and unlearn take classes of autograd Functions",
            function,
            "pass the class on which apply is called, not a tensor or a node",
        )
    with _LOCK:
        for function in functions:
            _CHOSEN[function] = exact
            for known in [each for each in _KINDS if issubclass(each, function)]:
                del _KINDS[known]


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """What the split knows of one custom Function.

    Attributes:
        name: its name, with its module.
        waiting: the inputs of its forward, by index, whose gradients wait or could wait.
        verdict: "split", "whole" or "untried".
        why: the reason, where it is not split.
        exact: whether it is equal to the whole backward in every bit, where it is split.
        seconds: how long the whole backward and its parts took in the trial.
        held: the most bytes that waited for W in a trial.
        calls: how often its backward was called in two parts.
    """

    name: str
    waiting: tuple[int, ...]
    verdict: Literal["split", "whole", "untried"]
    why: str
    exact: bool | None
    seconds: PartTimes | None
    held: int
    calls: int


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """Every custom Function that the split has met, as a table."""

    rows: tuple[FunctionKind, ...]

    def __iter__(self) -> Iterator[FunctionKind]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no custom Function with weights was met"
        head = ("Function", "waits", "", "(I + W) / whole", "W / whole", "bits", "held", "calls", "")
        lines: list[tuple[str, ...]] = [head, *map(_cells, self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        texts = ["  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=True)]) for line in lines]
        return "\n".join(text.rstrip() for text in texts)


def _cells(row: FunctionKind) -> tuple[str, ...]:
    times = ("", "")
    if row.seconds is not None and row.seconds.whole > 0:
        both, whole = row.seconds.inputs + row.seconds.weights, row.seconds.whole
        times = (f"{both / whole:.2f}", f"{row.seconds.weights / whole:.2f}")
    bits = {True: "equal", False: "rounded", None: ""}[row.exact]
    held = show_bytes(row.held) if row.verdict == "split" else ""
    waits = ", ".join(map(str, row.waiting))
    calls = str(row.calls) if row.verdict == "split" else ""
    return (row.name, waits, row.verdict, *times, bits, held, calls, row.why)


def kinds() -> FunctionKinds:
    """Every custom Function with weights that the split has met, and how its backward is called. Print it.

    Example:
        >>> from sternway import split
        >>> table = split.kinds()
        >>> [row.name for row in table if row.verdict == "split"]
        []
    """
    with _LOCK:
        met = [(function, kind) for function, known in _KINDS.items() for kind in known.values()]
    rows = [_row(function, kind) for function, kind in met]
    return FunctionKinds(tuple(sorted(rows, key=lambda row: (row.verdict, row.name, row.waiting))))


def _row(function: type, kind: LearnedKind) -> FunctionKind:
    name, waiting = f"{function.__module__}.{function.__qualname__}", tuple(sorted(kind.waiting))
    exact = all(kind.forms.values()) if kind.verdict == "split" else None
    return FunctionKind(name, waiting, kind.verdict, kind.why, exact, kind.seconds, kind.held, kind.calls)
