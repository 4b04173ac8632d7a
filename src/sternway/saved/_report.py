"""What the policies did, by module and in total."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from sternway._bytes import show_bytes
from sternway.saved.stores._copies import Wait

_MANY = 512  # waits to collect before the times of those that are over are added up


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What became of the tensors that one module saved.

    Without a codec ``packed_bytes = moved_bytes + kept_bytes + sum(skipped.values())``.

    Attributes:
        module: its name; empty outside of all modules.
        packs: how many tensors it saved.
        packed_bytes: bytes of the storages that it saved, each counted once.
        moved_bytes: bytes of these that went to a store.
        kept_bytes: bytes that stayed on the device because the budget allowed it.
        deduplicated_bytes: bytes that were saved again while their storage was saved already.
        skipped: bytes that the policies left alone, by reason.
        encoded_from: bytes before a codec.
        encoded_to: bytes after it.
        stall_seconds: how long the computation waited for copies.
    """

    module: str
    packs: int
    packed_bytes: int
    moved_bytes: int
    kept_bytes: int
    deduplicated_bytes: int
    skipped: dict[str, int]
    encoded_from: int
    encoded_to: int
    stall_seconds: float

    @property
    def ratio(self) -> float:
        """How many times smaller the codecs made what they encoded; 1 if nothing."""
        return self.encoded_from / self.encoded_to if self.encoded_to else 1.0

    def _cells(self) -> list[str]:
        return [
            self.module or "(no module)",
            str(self.packs),
            show_bytes(self.packed_bytes),
            show_bytes(self.moved_bytes),
            show_bytes(self.kept_bytes),
            show_bytes(self.deduplicated_bytes),
            *((show_bytes(self.encoded_from), show_bytes(self.encoded_to)) if self.encoded_to else ("", "")),
            f"{self.ratio:.1f}" if self.encoded_to else "",
            f"{1000 * self.stall_seconds:.1f} ms" if self.stall_seconds else "",
            ", ".join(f"{reason} {show_bytes(size)}" for reason, size in self.skipped.items()),
        ]


@dataclass(slots=True)
class Line:
    """One module's counters. Only their own methods change them, under the report's lock."""

    module: str
    lock: threading.RLock
    hold: Callable[[int], None]
    """So many bytes more, or fewer, are on the device."""
    packs: int = 0
    packed: int = 0
    moved: int = 0
    kept: int = 0
    deduplicated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    encoded_from: int = 0
    encoded_to: int = 0
    seconds: float = 0.0
    waits: list[Wait] = field(default_factory=list)

    def skip(self, reason: str, size: int) -> None:
        with self.lock:
            self.packs += 1
            self.packed += size
            self.skipped[reason] += size

    def no_room(self, size: int) -> None:
        with self.lock:
            self.skipped["no room"] += size

    def again(self, size: int) -> None:
        with self.lock:
            self.packs += 1
            self.deduplicated += size

    def new(self, raw: int, size: int, encoded: bool) -> None:
        with self.lock:
            self.packs += 1
            self.packed += raw
            if encoded:
                self.encoded_from += raw
                self.encoded_to += size

    def stay(self, size: int) -> None:
        with self.lock:
            self.kept += size

    def move(self, size: int) -> None:
        with self.lock:
            self.moved += size

    def wait(self, wait: Wait | None) -> None:
        if wait is not None:
            with self.lock:
                self.waits.append(wait)
                if len(self.waits) > _MANY:
                    self.settle([wait for wait in self.waits if wait.over()])

    def settle(self, waits: list[Wait]) -> None:
        """Add up the times of waits; blocks until they are known."""
        self.seconds += sum(wait.seconds() for wait in waits)
        self.waits = [wait for wait in self.waits if wait not in waits]

    def row(self) -> ModuleRow:
        with self.lock:
            self.settle(self.waits)
            return ModuleRow(
                module=self.module,
                packs=self.packs,
                packed_bytes=self.packed,
                moved_bytes=self.moved,
                kept_bytes=self.kept,
                deduplicated_bytes=self.deduplicated,
                skipped=dict(self.skipped),
                encoded_from=self.encoded_from,
                encoded_to=self.encoded_to,
                stall_seconds=self.seconds,
            )


class Report:
    """What became of everything that was saved in a ``with`` block; it counts until the backward is over.

    Nested policies share one report. ``print(report)`` shows a table.

    Example:
        >>> from sternway import saved
        >>> layer = torch.nn.Linear(64, 64)
        >>> with saved.compress("int8", min_bytes=0) as report:
        ...     y = layer(torch.randn(32, 64)).relu().sum()
        >>> report.packed_bytes
        16384
        >>> round(report.total.ratio, 1)
        3.9
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = self._peak = 0
        self._lines: dict[str, Line] = {}

    def line(self, module: str) -> Line:
        """The counters of one module."""
        with self._lock:
            if module not in self._lines:
                self._lines[module] = Line(module, self._lock, self._hold)
            return self._lines[module]

    def _hold(self, change: int) -> None:
        with self._lock:
            self._held += change
            self._peak = max(self._peak, self._held)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved so far."""
        return not self._lines

    def only_skipped(self) -> dict[str, int]:
        """Bytes by reason, if all that was saved so far was skipped; else nothing. It waits for no copy."""
        with self._lock:
            lines = list(self._lines.values())
            skipped = sum((line.skipped for line in lines), Counter())
            return dict(skipped) if skipped.total() == sum(line.packed for line in lines) else {}

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """One row for each module that saved something, in the order in which they did."""
        return tuple([line.row() for line in list(self._lines.values())])

    @property
    def total(self) -> ModuleRow:
        """All modules as one."""
        rows = self.modules
        skipped: Counter[str] = Counter()
        for row in rows:
            skipped.update(row.skipped)
        sums = {name: sum(getattr(row, name) for row in rows) for name in _COUNTS}
        return ModuleRow(module="total", skipped=dict(skipped), **sums)

    @property
    def packed_bytes(self) -> int:
        """Bytes that autograd would have kept: storages saved, each once."""
        return self.total.packed_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that went to a store."""
        return self.total.moved_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that stayed on the device because the budget allowed it."""
        return self.total.kept_bytes

    @property
    def deduplicated_bytes(self) -> int:
        """Bytes that were saved again while their storage was saved already."""
        return self.total.deduplicated_bytes

    @property
    def skipped(self) -> dict[str, int]:
        """Bytes that the policies left alone, by reason."""
        return self.total.skipped

    @property
    def ratio(self) -> float:
        """How many times smaller the codecs made what they encoded."""
        return self.total.ratio

    @property
    def stall_seconds(self) -> float:
        """How long the computation waited for copies."""
        return self.total.stall_seconds

    @property
    def held_bytes(self) -> int:
        """Bytes on the device now, of what the policies did not skip."""
        return self._held

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were on the device at once, of what the policies did not skip."""
        return self._peak

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        record = {
            "format": "sternway.saved",
            "total": asdict(self.total) | {"ratio": self.ratio, "peak_bytes": self.peak_bytes},
            "modules": [asdict(row) for row in self.modules],
        }
        return json.dumps(record)

    def cells(self) -> list[list[str]]:
        """The table's text: a header, a line for each module, and the total."""
        return [list(_HEADER), *(row._cells() for row in (*self.modules, self.total))]

    def table(self) -> str:
        """A table in plain text: a line for each module, the total, and the peak."""
        lines = self.cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.ljust(width) if column in (0, len(widths) - 1) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, f"peak on the device: {show_bytes(self.peak_bytes)}"])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        total = self.total
        parts = [f"{show_bytes(total.packed_bytes)} packed", f"{show_bytes(total.moved_bytes)} moved"]
        if total.encoded_to:
            parts.append(f"encoded {total.ratio:.1f} times smaller")
        return f"Report({', '.join(parts)}, peak {show_bytes(self.peak_bytes)})"


_COUNTS = (
    "packs",
    "packed_bytes",
    "moved_bytes",
    "kept_bytes",
    "deduplicated_bytes",
    "encoded_from",
    "encoded_to",
    "stall_seconds",
)
_HEADER = ("module", "packs", "packed", "moved", "kept", "again", "encoded", "into", "ratio", "stalled", "skipped")
