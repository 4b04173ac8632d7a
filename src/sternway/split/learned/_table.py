"""What the split has learned of Functions, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sternway._bytes import show_bytes
from sternway.split.learned._record import LOCK, RECORDS, LearnedKind
from sternway.split.learned._try import PartTimes


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
    with LOCK:
        records = list(RECORDS.items())
    met = [(function, kind) for function, record in records for kind in list(record.kinds.values())]
    rows = [_row(function, kind) for function, kind in met]
    return FunctionKinds(tuple(sorted(rows, key=lambda row: (row.verdict, row.name, row.waiting))))


def _row(function: type, kind: LearnedKind) -> FunctionKind:
    name, waiting = f"{function.__module__}.{function.__qualname__}", tuple(sorted(kind.waiting))
    exact = all(kind.forms.values()) if kind.verdict == "split" else None
    return FunctionKind(name, waiting, kind.verdict, kind.why, exact, kind.seconds, kind.held, kind.calls)
