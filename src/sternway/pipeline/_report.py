"""What a rank leaves behind when a step fails: a file that says who failed, and what this rank had done by then."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sternway.pipeline._watch import Loss, Spot
from sternway.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank is in a step: ``times`` grows by one pair with each action done."""

    step: int
    rank: int
    schedule: Schedule
    times: list[tuple[float, float]]

    def spot(self) -> Spot:
        actions = self.schedule.actions[self.rank]
        done = len(self.times)
        if done >= len(actions):
            return Spot(self.step)
        return Spot(self.step, actions[done].actions[0].stage, str(actions[done]))

    def timeline(self) -> list[dict[str, Any]]:
        """The actions done so far, in seconds from the first one's start."""
        zero = self.times[0][0] if self.times else 0.0
        return [
            {"action": str(action), "start": start - zero, "end": end - zero}
            for action, (start, end) in zip(self.schedule.actions[self.rank], self.times, strict=False)
        ]


def default_folder() -> Path:
    """Where reports go, unless a pipeline is told: $STERNWAY_REPORTS, or a folder among the temporary ones."""
    named = os.environ.get("STERNWAY_REPORTS")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"sternway-reports-{getattr(os, 'getuid', int)()}"


def write(
    folder: Path, rank: int, error: BaseException, loss: Loss | None, position: Position | None, others: dict[int, str]
) -> Path | None:
    """Write the report; None if that fails, too: what is reported matters more."""
    content = {
        "rank": rank,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "error": f"{type(error).__name__}: {error}",
        "lost": None if loss is None else asdict(loss),
        "here": None if position is None else asdict(position.spot()),
        "timeline": [] if position is None else position.timeline(),
        "schedule": None if position is None else position.schedule.name,
        "last_seen": {str(other): sign for other, sign in sorted(others.items())},
    }
    path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-rank-{rank}.json"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".tmp")
        half.write_text(json.dumps(content, indent=1), encoding="utf-8")
        half.rename(path)
        return path
    return None
