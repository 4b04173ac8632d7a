"""What the policies did: per module and in total."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field

from sternway._bytes import show_bytes
from sternway.saved._ticket import Wait

_MANY = 512  # waits that are put aside before those that are over are added up


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What became of the tensors that one module saved.

    Without a codec ``packed_bytes = moved_bytes + kept_bytes + sum(skipped.values())``.
    """

    module: str
    packs: int
    packed_bytes: int  # storages saved, each once
    moved_bytes: int  # that went to a store
    kept_bytes: int  # that stayed on the device because the budget let them
    deduplicated_bytes: int  # saved again while their storage was there already
    skipped: dict[str, int]  # bytes that a policy left as they were, by reason
    encoded_from: int  # bytes before and after a codec
    encoded_to: int
    stall_seconds: float  # waited for copies

    @property
    def ratio(self) -> float:
        """How many times smaller the codecs made what they were given; 1 if nothing."""
        return self.encoded_from / self.encoded_to if self.encoded_to else 1.0


@dataclass(slots=True)
class Line:
    """One module's counters, while they count."""

    module: str
    report: Report
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
        with self.report.lock:
            self.packs += 1
            self.packed += size
            self.skipped[reason] += size

    def no_room(self, size: int) -> None:
        with self.report.lock:
            self.skipped["no room"] += size

    def again(self, size: int) -> None:
        with self.report.lock:
            self.packs += 1
            self.deduplicated += size

    def new(self, raw: int, size: int, encoded: bool) -> None:
        with self.report.lock:
            self.packs += 1
            self.packed += raw
            if encoded:
                self.encoded_from += raw
                self.encoded_to += size

    def stay(self, size: int) -> None:
        with self.report.lock:
            self.kept += size

    def move(self, size: int) -> None:
        with self.report.lock:
            self.moved += size

    def hold(self, change: int) -> None:
        """So many bytes more, or fewer, are on the device."""
        report = self.report
        with report.lock:
            report.held += change
            report.peak = max(report.peak, report.held)

    def wait(self, wait: Wait | None) -> None:
        if wait is not None:
            with self.report.lock:
                self.waits.append(wait)
                if len(self.waits) > _MANY:
                    self.settle([wait for wait in self.waits if wait.over()])

    def settle(self, waits: list[Wait]) -> None:
        """Add up waits; one that is not over is waited for."""
        self.seconds += sum(wait.seconds() for wait in waits)
        self.waits = [wait for wait in self.waits if wait not in waits]

    def row(self) -> ModuleRow:
        with self.report.lock:
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
    """What became of everything saved in a ``with`` block; it goes on counting until the backward is over.

    Policies nested in one another share one report.

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
        self.lock = threading.RLock()
        self.held = self.peak = 0
        self._lines: dict[str, Line] = {}

    def line(self, module: str) -> Line:
        with self.lock:
            if module not in self._lines:
                self._lines[module] = Line(module, self)
            return self._lines[module]

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
        """Bytes that stayed on the device because the budget let them."""
        return self.total.kept_bytes

    @property
    def deduplicated_bytes(self) -> int:
        """Bytes saved again while their storage was there already."""
        return self.total.deduplicated_bytes

    @property
    def skipped(self) -> dict[str, int]:
        """Bytes that no policy touched, by reason."""
        return self.total.skipped

    @property
    def ratio(self) -> float:
        """How many times smaller the codecs made what they were given."""
        return self.total.ratio

    @property
    def stall_seconds(self) -> float:
        """Time that the computation waited for copies."""
        return self.total.stall_seconds

    @property
    def peak_bytes(self) -> int:
        """The most that was on the device at once of what the policies had in hand; what they skipped is not in it."""
        return self.peak

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        record = {
            "format": "sternway.saved",
            "total": asdict(self.total) | {"ratio": self.ratio, "peak_bytes": self.peak_bytes},
            "modules": [asdict(row) for row in self.modules],
        }
        return json.dumps(record)

    def table(self) -> str:
        """The rows as plain text; `sternway saved` shows them in colour."""
        lines = [list(HEADER), *(cells(row) for row in self.modules), cells(self.total)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        shown = [
            "  ".join(
                cell.ljust(width) if column in (0, len(HEADER) - 1) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, f"peak on the device: {show_bytes(self.peak_bytes)}"])

    def __repr__(self) -> str:
        return f"Report({show_bytes(self.packed_bytes)} packed, {show_bytes(self.moved_bytes)} moved)"


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
HEADER = ("module", "packs", "packed", "moved", "kept", "again", "ratio", "stalled", "skipped")


def cells(row: ModuleRow) -> list[str]:
    """One row, to be read."""
    return [
        row.module or "(no module)",
        str(row.packs),
        show_bytes(row.packed_bytes),
        show_bytes(row.moved_bytes),
        show_bytes(row.kept_bytes),
        show_bytes(row.deduplicated_bytes),
        f"{row.ratio:.1f}" if row.encoded_to else "",
        f"{1000 * row.stall_seconds:.1f} ms" if row.stall_seconds else "",
        ", ".join(f"{reason} {show_bytes(size)}" for reason, size in row.skipped.items()),
    ]
