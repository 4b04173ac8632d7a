"""``sternway plan``, by its complete output. The comparison is a small fake: the search has its own tests."""

import json
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from sternway import schedule
from sternway.cli._plan import parse_costs, plan
from sternway.errors import ScheduleError
from sternway.schedule import Costs, Schedule, Timeline

APP = typer.Typer()
APP.command()(plan)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    schedule: Schedule
    timeline: Timeline
    peak_memory: float
    bubble_rate: float
    makespan: float
    gap: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]
    unmade: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Row:
        return min((row for row in self.rows if row.fits), key=lambda row: row.bubble_rate)


def fake_best(costs, *, ranks, microbatches, memory_limit, progress=None):
    rows = []
    for done, name in enumerate(("1f1b", "zb-h1", "zb-h2")):
        s = schedule.make(name, ranks=ranks, microbatches=microbatches)
        t = s.simulate(costs)
        fits = t.peak_memory <= memory_limit
        gap = t.span / max(t.busy) - 1
        rows.append(Row(name, s, t, t.peak_memory, t.bubble_rate, t.makespan, gap, fits))
        progress(done + 1, 3)
    return Comparison(tuple(rows), (("dualpipe-v", "too few microbatches"),))


@pytest.fixture
def faked(monkeypatch):
    monkeypatch.setattr(schedule, "best", fake_best, raising=False)


def run(*args):
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(APP, list(map(str, args)))


def test_the_comparison(faked):
    result = run("--ranks", 2, "--microbatches", 3)
    assert result.exit_code == 0
    assert "\n".join(line.rstrip() for line in result.stdout.split("\n")) == (
        "2 ranks, 3 microbatches, memory limit 2\n"
        "┏━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━┓\n"
        "┃ schedule ┃ bubble rate ┃ makespan ┃ peak memory ┃ above bound ┃ fits ┃\n"
        "┡━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━┩\n"
        "│ 1f1b     │      25.00% │       12 │           2 │      33.33% │ yes  │\n"
        "│ zb-h1    │      10.00% │       10 │           2 │      11.11% │ best │\n"
        "│ zb-h2    │       0.00% │       10 │           3 │       0.00% │ no   │\n"
        "└──────────┴─────────────┴──────────┴─────────────┴─────────────┴──────┘\n"
        "dualpipe-v: too few microbatches\n"
        "zb-h1: 2 ranks, 3 microbatches; makespan 10, bubble rate 10.0%, peak memory 2\n"
        "rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2 |\n"
        "rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2 |\n"
        "critical path: I of stage 0 30%, W of stage 0 30%, F of stage 0 20%\n"
    )


def test_the_comparison_as_json_and_files(faked, tmp_path):
    out = tmp_path / "new" / "plan"
    result = run("--ranks", 2, "--microbatches", 4, "--memory", 3, "--costs", "F=2,W=0.5", "--out", out, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["ok"], told["best"], told["memory_limit"]) == (True, "zb-h2", 3)
    assert [row["name"] for row in told["rows"]] == ["1f1b", "zb-h1", "zb-h2"]
    assert told["unmade"] == {"dualpipe-v": "too few microbatches"}
    assert schedule.from_json(json.dumps(told["schedule"])) == schedule.make("zb-h2", ranks=2, microbatches=4)
    names = ["zb-h2.csv", "zb-h2.comms.csv", "zb-h2.json", "zb-h2.svg", "zb-h2.trace.json"]
    assert told["files"] == [str(out / name) for name in names]
    assert schedule.from_csv((out / names[1]).read_text(), name="zb-h2") == schedule.from_json(
        (out / names[2]).read_text()
    )
    assert json.loads((out / names[4]).read_text())["traceEvents"]


def test_checking_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(schedule.make("1f1b", ranks=2, microbatches=2).to_csv())
    result = run("--check", path, "--costs", "W=0", "--memory", 2)
    assert result.exit_code == 0
    assert result.stdout.replace("\n", "").startswith(f"{path}: placed, complete, ordered, executable, in memory")
    assert "rank 1 |.  F0 B0 F1 B1 .  |\n" in result.stdout
    told = json.loads(run("--check", path, "--json").stdout)
    assert (told["ok"], told["makespan"], told["peak_memory"]) == (True, 9, 2)
    as_json = tmp_path / "mine.json"
    as_json.write_text(schedule.make("zb-v", ranks=2, microbatches=3).to_json())
    assert json.loads(run("--check", as_json, "--json").stdout)["bubble_rate"] == 0


def test_checking_a_broken_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F0,0B0\n")
    result = run("--check", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: an action runs once; got 0F0 again (rank 0, step 1), after step 0. Fix: remove one of them\n"
    )
    told = json.loads(run("--check", path, "--json").stdout)
    assert told == {
        "ok": False,
        "error": {
            "rule": "an action runs once",
            "got": "0F0 again (rank 0, step 1), after step 0",
            "fix": "remove one of them",
        },
    }


def test_a_file_that_is_not_there(tmp_path):
    result = run("--check", tmp_path / "none.csv")
    assert result.exit_code == 1
    assert "error: a schedule file is text that can be read; got" in result.stderr


def test_out_that_is_no_directory(faked, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--ranks", 2, "--microbatches", 2, "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "error: --out is a directory to write into; got" in result.stderr


def test_something_to_do_has_to_be_given():
    result = run("--ranks", 2)
    assert result.exit_code == 2
    assert "give --ranks and --microbatches, or --check FILE" in result.stderr


def test_costs_on_the_command_line():
    assert parse_costs("") == Costs()
    assert parse_costs("B=1.5").B == 1.5
    assert parse_costs("F=2, I=1:2, comm=0.5", 0.25) == Costs(F=2, I=[1, 2], comm=0.5, memory_after_I=0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("G=1", "costs are F, I, W, B, comm, each once; got 'G=1'"),
        ("F=1,F=2", "costs are F, I, W, B, comm, each once; got 'F=2'"),
        ("F", "a cost is a number, or one for each stage with colons between; got 'F'"),
        ("F=1:x", "a cost is a number, or one for each stage with colons between; got 'F=1:x'"),
        ("F=-1", "a cost is finite and not negative; got F=-1.0"),
    ],
)
def test_costs_that_are_none(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_costs(text)
    result = run("--ranks", 2, "--microbatches", 2, "--costs", text)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.skipif(not hasattr(schedule, "search"), reason="the search is not here yet")
def test_the_real_search(tmp_path):
    result = run("--ranks", 3, "--microbatches", 4, "--memory", 3, "--costs", "W=0.5", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    found = schedule.from_json(json.dumps(told["schedule"])).check(memory_limit=3)
    rates = {row["name"]: row["bubble_rate"] for row in told["rows"] if row["fits"]}
    assert found.simulate(Costs(W=0.5)).bubble_rate == min(rates.values()) == rates[told["best"]]
