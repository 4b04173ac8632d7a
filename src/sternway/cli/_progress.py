"""A progress bar on stderr: it moves while something runs, also while it is not known how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def moving_bar(quiet: bool, text: str = "starting") -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar, and the function that sets it: (done, total or None, what goes on). Nothing if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[count]}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, expand=True,
        disable=quiet or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(text, total=None, count="")

        def update(done: int, total: int | None, text: str) -> None:
            count = f"{done}/{total}" if total else ""
            bar.tasks[0].total = total  # update() cannot set None, which makes it move to and fro
            bar.update(task, completed=done, description=text, count=count)

        yield update
