"""What commands print is legible at any width: no cell is cut, what is left out is named, a pipe gets everything."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from sternway.cli import app
from sternway.cli._progress import MovingBar
from sternway.cli._table import TableColumn, show_table

COMMANDS = {
    "plan": ["plan", "--ranks", "2", "--microbatches", "4"],
    "saved": ["saved", "--to", "none", "--codec", "int8", "--steps", "1"],
    "doctor": ["doctor"],
}


def run(arguments: list[str], width: int | None) -> str:
    result = CliRunner(env={"COLUMNS": None if width is None else str(width), "TERM": "dumb"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def table_of(text: str) -> list[list[str]]:
    """The cells of the first table."""
    rows = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in rows]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_cell_is_cut_at_any_width(command: str, width: int) -> None:
    text = run(COMMANDS[command], width)
    lines = [line for line in text.splitlines() if line[:1] in "│┃┏┡└" and line]
    assert lines
    assert max(map(len, lines)) <= width
    assert "…" not in text


def test_plan_keeps_its_verdict_and_names_what_it_leaves_out() -> None:
    text = run(COMMANDS["plan"], 60)
    head, *rows = table_of(text)
    assert head == ["schedule", "bubble", "makespan", "memory", "fits"]
    assert [row[-1] for row in rows].count("best") == 1
    assert {row[-1] for row in rows} == {"best", "yes", "no"}
    assert "left out, as there is no room: period, above bound\n" in text
    assert "left out" not in run(COMMANDS["plan"], 80)


def test_a_pipe_gets_every_column() -> None:
    text = run(COMMANDS["saved"], None)
    head, *rows = table_of(text)
    assert head == ["module", "packs", "packed", "moved", "kept", "again", "encoded", "into", "ratio", "skipped"]
    assert "left out" not in text
    total = rows[-1]
    assert total[0] == "total"
    sizes = []
    for cell in (total[6], total[7]):
        number, unit = cell.split()
        sizes.append(float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit])
    assert float(total[8]) == pytest.approx(sizes[0] / sizes[1], abs=0.1)  # the ratio of the two columns before it


def test_what_cannot_be_left_out_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    columns = [TableColumn("name", right=False), TableColumn("a", drop=1), TableColumn("b", drop=2), TableColumn("end")]
    show_table(columns, [("x" * 8, "1" * 9, "", "yes")], title="Title")
    text = capsys.readouterr().out
    assert table_of(text) == [["name", "end"], ["x" * 8, "yes"]]
    assert text.startswith("Title\n")
    assert "left out, as there" in text
    assert text.replace("\n", " ").rstrip().endswith(": a")  # b was empty


def test_a_bar_of_unknown_length_moves_and_a_line_stays() -> None:
    out = io.StringIO()
    with Progress(console=Console(file=out), disable=True) as progress:
        bar = MovingBar(progress, "starting", quiet=False)
        assert progress.tasks[0].total is None
        bar.update(3, 10, "training")
        assert (progress.tasks[0].completed, progress.tasks[0].total) == (3, 10)
        bar.update(3, None, "building")
        assert progress.tasks[0].total is None
        assert progress.tasks[0].description == "building"
        bar.say("rank [1] killed")
        MovingBar(progress, "", quiet=True).say("nobody sees this")
    assert out.getvalue() == "rank [1] killed\n"
