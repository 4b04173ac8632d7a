"""The difference between two graphs, by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class _Row(Protocol):
    @property
    def saved_bytes(self) -> int: ...
    @property
    def kinds(self) -> tuple[tuple[str, int], ...]: ...


@dataclass(frozen=True, slots=True)
class Change:
    """What changed in one module: kinds of nodes with their counts, and the bytes saved before and after."""

    module: str
    added: tuple[tuple[str, int], ...]
    removed: tuple[tuple[str, int], ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        parts = [f"+{count} {kind}" for kind, count in self.added] + [
            f"-{count} {kind}" for kind, count in self.removed
        ]
        if self.bytes_before != self.bytes_after:
            change = self.bytes_after - self.bytes_before
            parts.append(f"{change:+,} bytes ({self.bytes_before:,} → {self.bytes_after:,})")
        return f"{self.module or '(no module)'}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Diff:
    """The modules that differ; false if none does. Prints as one line a module.

    Example:
        >>> from sternway import graph
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> print(graph.capture(layer(x).sum(), layer).diff(graph.capture(layer(x).relu().sum(), layer)))
        (no module): +1 ReluBackward0, +8 bytes (8 → 16)
    """

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"


def compare(before: Mapping[str, _Row], after: Mapping[str, _Row]) -> Diff:
    changes = []
    for module in dict.fromkeys([*before, *after]):
        old, new = before.get(module), after.get(module)
        old_kinds, new_kinds = Counter(dict(old.kinds if old else ())), Counter(dict(new.kinds if new else ()))
        change = Change(
            module,
            tuple(sorted((new_kinds - old_kinds).items())),
            tuple(sorted((old_kinds - new_kinds).items())),
            old.saved_bytes if old else 0,
            new.saved_bytes if new else 0,
        )
        if change.added or change.removed or change.bytes_before != change.bytes_after:
            changes.append(change)
    return Diff(tuple(changes))
