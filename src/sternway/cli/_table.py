"""Tables that stay legible: where a terminal is too narrow, whole columns are left out, and the table says which."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED = 160  # columns of a pipe or a file, which has no width of its own


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column. Those with the largest ``drop`` are left out first; 0 stays. ``wrap`` may take several lines."""

    heading: str
    drop: int = 0
    right: bool = True
    wrap: bool = False


def stdout() -> Console:
    """The console to print results on."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PIPED)


def show_table(
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    styles: Sequence[str] = (),
) -> None:
    """Print a table. A column that is empty in all rows is left out; ``styles`` has one entry for each row."""
    console = stdout()
    used = [place for place, column in enumerate(columns) if not rows or any(row[place] for row in rows)]
    shown = _fitting(columns, rows, used, console.width)
    if title:
        console.print(title, style="italic", highlight=False, markup=False)
    table = Table()
    for place in shown:
        column = columns[place]
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=not column.wrap)
    for number, row in enumerate(rows):
        cells = [Text.from_ansi(row[place]) for place in shown]
        table.add_row(*cells, style=styles[number] if styles else "")
    console.print(table)
    if left_out := [columns[place].heading for place in used if place not in shown]:
        console.print(f"left out, as there is no room: {', '.join(left_out)}", highlight=False, style="dim")


def _fitting(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], used: list[int], width: int) -> list[int]:
    """The columns that fit next to each other; a column that may wrap needs half of its longest cell, or 24."""

    def needed(place: int) -> int:
        heading, wrap = columns[place].heading, columns[place].wrap
        longest = max([len(heading), *(len(row[place]) for row in rows)])
        return max(len(heading), min(longest, max(24, longest // 2))) if wrap else longest

    shown = list(used)
    while sum(needed(place) + 3 for place in shown) + 1 > width:
        droppable = [place for place in shown if columns[place].drop]
        if not droppable:
            break
        shown.remove(max(droppable, key=lambda place: columns[place].drop))
    return shown
