"""The file that a rank writes when a step fails: which rank was lost, and what this rank had done by then."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sternway.pipeline.faults._lost import LostRank, Position
from sternway.schedule import Schedule, Upkeep


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is in a step: ``times`` gets one more (start, end) with each action done."""

    step: int
    rank: int
    schedule: Schedule
    times: list[tuple[float, float]]

    def position(self) -> Position:
        actions = self.schedule.actions[self.rank]
        done = len(self.times)
        if done >= len(actions):
            return Position(self.step)
        now = actions[done]
        return Position(self.step, now.stage if isinstance(now, Upkeep) else now.actions[0].stage, str(now))

    def timeline(self) -> list[dict[str, Any]]:
        """The actions done so far, in seconds from the first one's start."""
        zero = self.times[0][0] if self.times else 0.0
        return [
            {"action": str(action), "start": start - zero, "end": end - zero}
            for action, (start, end) in zip(self.schedule.actions[self.rank], self.times, strict=False)
        ]


def default_folder() -> Path:
    """Where reports go by default: $STERNWAY_REPORTS, or a folder in the system's temporary one."""
    named = os.environ.get("STERNWAY_REPORTS")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"sternway-reports-{getattr(os, 'getuid', int)()}"


def write_report(
    folder: Path,
    rank: int,
    error: BaseException,
    lost: LostRank | None,
    progress: Progress | None,
    last_seen: dict[int, str],
) -> Path | None:
    """Write the report; None if that fails, too: the error itself matters more."""
    content = {
        "rank": rank,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "error": f"{type(error).__name__}: {error}",
        "lost": None if lost is None else asdict(lost),
        "here": None if progress is None else asdict(progress.position()),
        "timeline": [] if progress is None else progress.timeline(),
        "schedule": None if progress is None else progress.schedule.name,
        "last_seen": {str(other): sign for other, sign in sorted(last_seen.items())},
    }
    path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-rank-{rank}.json"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".tmp")
        half.write_text(json.dumps(content, indent=1), encoding="utf-8")
        half.rename(path)
        return path
    return None
