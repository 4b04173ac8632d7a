"""``BuildReport``: what a run did, for the terminal, JSON and CI."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sternway.atlas.pages._links import BrokenLink
from sternway.atlas.read._tree import FileProblem


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The outcome of ``build`` or ``check``."""

    source: str
    out: str
    files: int
    folders: int
    lines: int
    languages: dict[str, int]
    written: int
    kept: int
    removed: int
    problems: tuple[FileProblem, ...]
    broken: tuple[BrokenLink, ...]
    stale: tuple[str, ...]  # only from ``check``: what differs between pages and source
    unresolved: int  # imports that should be in the tree and were not found
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no link is broken and, after a check, no page is stale."""
        return not self.broken and not self.stale

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        record = asdict(self)
        record["problems"] = [item._asdict() for item in self.problems]
        record["broken"] = [item._asdict() for item in self.broken]
        return {**record, "ok": self.ok}
