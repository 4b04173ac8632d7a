"""A progress bar on stderr: it moves while something runs, also while it is not known how long that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class MovingBar:
    """A bar that ``moving_bar`` shows."""

    def __init__(self, progress: Progress, text: str, quiet: bool) -> None:
        self._progress, self._quiet = progress, quiet
        self._task = progress.add_task(text, total=None, count="")

    def update(self, done: int, total: int | None, text: str) -> None:
        """So much is done, of so much (None: not known, and the bar moves to and fro), and this goes on."""
        self._progress.tasks[0].total = total  # Progress.update cannot set None
        count = f"{done}/{total}" if total else ""
        self._progress.update(self._task, completed=done, description=text, count=count)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._progress.console.print(text, highlight=False, markup=False)


@contextmanager
def moving_bar(quiet: bool, text: str = "starting") -> Iterator[MovingBar]:
    """Show a bar during a block, if stderr is a terminal; if ``quiet``, nothing at all."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, expand=True, disable=hidden) as progress:
        yield MovingBar(progress, text, quiet)
