"""``sternway plan``, by its complete output."""

import json

import pytest
from typer.testing import CliRunner

from sternway import schedule
from sternway.cli import app
from sternway.cli._plan import parse_costs
from sternway.errors import ScheduleError
from sternway.schedule import Costs


def run(*args):
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, ["plan", *map(str, args)])


def test_the_comparison():
    result = run("--ranks", 2, "--microbatches", 3)
    assert result.exit_code == 0
    assert "\n".join(line.rstrip() for line in result.stdout.split("\n")) == (
        "2 ranks, 3 microbatches, memory limit 2\n"
        "┏━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━┓\n"
        "┃ schedule         ┃ bubble ┃ period ┃ makespan ┃ memory ┃ above bound ┃ fits ┃\n"
        "┡━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━┩\n"
        "│ zb-v             │  0.00% │      9 │      9.5 │      2 │       0.00% │ best │\n"
        "│ v-half           │  0.00% │      9 │      9.5 │      2 │       0.00% │ yes  │\n"
        "│ search-v         │  0.00% │      9 │      9.5 │      2 │       0.00% │ yes  │\n"
        "│ v-min            │  5.26% │    9.5 │      9.5 │      2 │       5.56% │ yes  │\n"
        "│ zb-h1            │ 10.00% │     10 │       10 │      2 │       0.00% │ yes  │\n"
        "│ search           │ 10.00% │     10 │       10 │      2 │       0.00% │ yes  │\n"
        "│ 1f1b             │ 25.00% │     12 │       12 │      2 │      20.00% │ yes  │\n"
        "│ zb-h2            │  0.00% │      9 │       10 │      3 │             │ no   │\n"
        "│ interleaved-zb   │  5.26% │    9.5 │      9.5 │    2.5 │             │ no   │\n"
        "│ interleaved-1f1b │ 14.29% │   10.5 │     10.5 │      3 │             │ no   │\n"
        "│ looped-bfs       │ 14.29% │   10.5 │     10.5 │      3 │             │ no   │\n"
        "│ gpipe            │ 25.00% │     12 │       12 │      3 │             │ no   │\n"
        "└──────────────────┴────────┴────────┴──────────┴────────┴─────────────┴──────┘\n"
        "zb-v is 0.0% above anything possible; memory does not bind\n"
        "dualpipe-v: dualpipe-v needs at least two microbatches per rank, 4 for 2 ranks; got 3. "
        "Fix: use 4 or more, or zb-v, which takes any number\n"
        "zb-v: 2 ranks, 3 microbatches; makespan 9.5, bubble rate 0.0%, peak memory 2\n"
        "rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I'1 W'1 I0- W0- F'2 I'2 W'2 I1- W1- I2- W2- .   |\n"
        "rank 1 |.   F0- F'0 F1- F'1 I'0 W'0 F2- I0- W0- F'2 I'1 W'1 I1- I'2 I2- W1- W'2 W2- |\n"
        "critical path: F of stage 1 16%, F of stage 2 16%, I of stage 1 16%\n"
    )


def test_memory_in_bytes():
    numbers = ("--ranks", 2, "--microbatches", 4, "--json")
    told = json.loads(run(*numbers, "--memory", "14GB", "--activations", "2GB", "--static", "8GB").stdout)
    same = json.loads(run(*numbers, "--memory", 3).stdout)
    assert told["memory_limit"] == 3
    assert [row["name"] for row in told["rows"]] == [row["name"] for row in same["rows"]]
    assert all(row["peak_bytes"] == 8e9 + 2e9 * row["peak_memory"] for row in told["rows"])
    assert {row["peak_bytes"] for row in same["rows"]} == {None}
    shown = run("--ranks", 2, "--microbatches", 4, "--memory", "14GB", "--activations", "2GB", "--static", "8GB").stdout
    assert "memory limit 13.0 GiB" in shown
    assert f"\n{told['verdict']}\n" in shown
    for wrong, text in {
        ("--memory", "14GB"): "needs the bytes that a microbatch keeps",
        ("--memory", "much"): "needs the bytes that a microbatch keeps",
        ("--memory", "9GB", "--activations", "2GB", "--static", "8GB"): "give it 9.3 GiB or more",
        ("--memory", "14GB", "--activations", "two"): "--activations must be a size",
    }.items():
        result = run("--ranks", 2, "--microbatches", 4, *wrong)
        assert result.exit_code == 2, result.output
        assert text in str(result.exception) + result.output


def test_stages_that_may_be_recomputed():
    told = json.loads(
        run("--ranks", 2, "--microbatches", 3, "--memory", 1.1, "--recompute", 0.1, "--json").stdout
    )  # fmt: skip
    rows = {row["name"]: row["recompute"] for row in told["rows"]}
    assert rows["1f1b"] == []
    assert rows["1f1b, recomputed"] == [0, 1]
    assert told["schedule"].get("recompute", []) == rows[told["best"]]
    half = ("--costs", "W=0.5", "--memory", 1.5, "--recompute", 0, "--blocks", 2)
    told = json.loads(run("--ranks", 2, "--microbatches", 3, *half, "--json").stdout)
    assert next(row["recompute"] for row in told["rows"] if row["name"] == "search") == [[0, 0.5]]
    assert "recompute" not in json.loads(run("--ranks", 2, "--microbatches", 3, "--json").stdout)["schedule"]


def test_microbatches_that_may_be_offloaded():
    told = json.loads(run("--ranks", 2, "--microbatches", 3, "--memory", 1.1, "--offload", 0.1, "--json").stdout)
    rows = {row["name"]: row["offloaded"] for row in told["rows"]}
    assert rows["1f1b"] == [0, 0]
    assert rows["1f1b, offloaded"][0] > 0
    assert sum(rows[told["best"]]) > 0
    assert told["verdict"].endswith("with unlimited memory")
    assert any("OFFLOAD" in step for steps in told["schedule"]["actions"] for step in steps)


def test_the_comparison_as_json_and_files(tmp_path):
    out = tmp_path / "new" / "plan"
    result = run("--ranks", 2, "--microbatches", 3, "--memory", 3, "--costs", "F=2,W=0.5", "--out", out, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    expected = schedule.compare(Costs(F=2, W=0.5), ranks=2, microbatches=3, memory_limit=3)
    assert (told["ok"], told["best"], told["memory_limit"]) == (True, expected.best.name, 3)
    fields = ("name", "bubble_rate", "period", "makespan", "peak_memory", "peak_bytes", "fits")
    assert told["rows"] == [
        {field: getattr(row, field) for field in fields}
        | {"gap": row.gap if row.fits else None, "recompute": [], "offloaded": [0, 0]}
        for row in expected.rows
    ]
    below = run("--ranks", 2, "--microbatches", 3, "--memory", 1, "--json")  # the bound of schedules that fit
    assert {row["gap"] for row in json.loads(below.stdout)["rows"] if not row["fits"]} == {None}
    assert told["unmade"] == dict(expected.unmade)
    assert list(told["unmade"]) == ["dualpipe-v"]
    best = expected.best.schedule
    assert schedule.from_json(json.dumps(told["schedule"])) == best
    csv, comms, as_json, svg, trace, page = (
        f"{best.name}.{ext}" for ext in ("csv", "comms.csv", "json", "svg", "trace.json", "html")
    )
    assert told["files"] == [str(out / name) for name in (csv, comms, as_json, svg, trace, page)]
    assert schedule.from_csv((out / csv).read_text(), name=best.name) == best
    assert schedule.from_csv((out / comms).read_text(), name=best.name) == best
    assert schedule.from_json((out / as_json).read_text()) == best
    assert (out / svg).read_text() == expected.best.timeline.to_svg()
    assert (out / trace).read_text() == expected.best.timeline.to_chrome_trace()


def test_the_page(tmp_path, browser):
    out = tmp_path / "new" / "plan.html"
    told = json.loads(run("--ranks", 3, "--microbatches", 5, "--costs", "W=0.5", "--out", out, "--json").stdout)
    assert told["files"] == [str(out)]
    assert list(out.parent.iterdir()) == [out]
    expected = schedule.compare(Costs(W=0.5), ranks=3, microbatches=5, memory_limit=3)
    browser.size(1400)
    browser.open(out)
    cells = browser.run(
        "[...document.querySelectorAll('.sheet tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [row[0] for row in cells] == [
        *(row.name for row in expected.rows),
        *(name for name, _ in expected.unmade),
    ]
    assert cells[0][-1] == "best"
    assert [row[2] for row in cells[: len(expected.rows)]] == [f"{row.bubble_rate:.2%}" for row in expected.rows]
    best = expected.best.timeline
    assert browser.run("document.querySelectorAll('rect.event').length") == sum(map(len, best.events))
    assert browser.run("document.querySelectorAll('polyline.path').length") == 1
    assert browser.run("document.querySelector('text.limit-text').textContent") == "limit 3"
    assert f"bubble {best.bubble_rate:.1%}" in browser.run("document.querySelector('.run h3').textContent")
    assert browser.barriers() == []
    for width in (800, 1600):
        browser.size(width)
        assert browser.overflow() <= 0
    mine = tmp_path / "mine.csv"
    mine.write_text(schedule.make("dualpipe-v", ranks=2, microbatches=4).to_csv())
    assert run("--check", mine, "--out", out).exit_code == 0
    browser.open(out)
    browser.run("(v => v.choose(v.runs[0], v.runs[0].events.find(e => e.op === '+')))(sternway.views.Report.active)")
    assert "forward and backward overlapped" in browser.run("document.querySelector('.panel').innerText")


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
        "error: an action must run once; got 0F0 again (rank 0, step 1), after step 0. Fix: remove one of them\n"
    )
    told = json.loads(run("--check", path, "--json").stdout)
    assert told == {
        "ok": False,
        "error": {
            "rule": "an action must run once",
            "got": "0F0 again (rank 0, step 1), after step 0",
            "fix": "remove one of them",
        },
    }


def test_a_file_that_is_not_there(tmp_path):
    result = run("--check", tmp_path / "none.csv")
    assert result.exit_code == 2
    assert "error: the schedule file cannot be read; got" in result.stderr


def test_out_that_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--ranks", 2, "--microbatches", 2, "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "error: --out cannot be written to; got" in result.stderr


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
        (
            "G=1",
            "costs must be some of F, I, W, B, comm, comm_busy, overhead, receive, overlap, spread, each once; "
            "got 'G=1'",
        ),
        (
            "F=1,F=2",
            "costs must be some of F, I, W, B, comm, comm_busy, overhead, receive, overlap, spread, each once; "
            "got 'F=2'",
        ),
        ("F", "a cost must be a number, or one for each stage with colons between; got 'F'"),
        ("F=1:x", "a cost must be a number, or one for each stage with colons between; got 'F=1:x'"),
        ("F=-1", "a cost must be finite and not negative; got F=-1.0"),
    ],
)
def test_costs_that_are_none(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_costs(text)
    result = run("--ranks", 2, "--microbatches", 2, "--costs", text)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_best_row_is_the_best_that_fits():
    result = run("--ranks", 3, "--microbatches", 4, "--memory", 3, "--costs", "W=0.5", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    found = schedule.from_json(json.dumps(told["schedule"])).check(memory_limit=3)
    rates = {row["name"]: row["bubble_rate"] for row in told["rows"] if row["fits"]}
    assert found.simulate(Costs(W=0.5)).bubble_rate == min(rates.values()) == rates[told["best"]]


def test_a_limit_without_end_is_json_and_a_page(tmp_path):
    numbers = ("--ranks", 2, "--microbatches", 3, "--memory", "inf", "--out", tmp_path / "plan.html", "--json")
    told = json.loads(run(*numbers).stdout, parse_constant=pytest.fail)
    assert told["memory_limit"] is None
    assert told["files"] == [str(tmp_path / "plan.html")]
    assert "memory limit inf" in run("--ranks", 2, "--microbatches", 3, "--memory", "inf").stdout
