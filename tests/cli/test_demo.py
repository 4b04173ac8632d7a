"""``sternway demo`` with real processes, and the report it writes in a real Chromium."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import Browser
from gloo import TORCH, warm_up
from sternway import cli, schedule
from sternway.cli._progress import MovingBar
from sternway.schedule import names

SMALL = ("--dim", "16", "--layers", "4", "--steps", "3", "--microbatches", "4", "--compared-steps", "1")


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


def _demo(*arguments: str, out: Path) -> str:
    result = CliRunner().invoke(cli.app, ["demo", *SMALL, *arguments, "--out", str(out)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("demo")
    return json.loads(_demo("--schedule", "zb-h1", "--json", out=out)), out / "report.html"


def test_trains_across_processes(trained: tuple[dict[str, Any], Path]) -> None:
    record, report = trained
    assert record["gradients_equal"]
    assert len(record["losses"]) == 3
    assert record["schedule"] == "zb-h1"
    zero_bubble = "ZBVZeroBubble" if TORCH >= (2, 13) else "InterleavedZeroBubble"
    theirs = {"torch Schedule1F1B", f"torch Schedule{zero_bubble}"}
    assert set(record["efficiency"]) == set(record["step_ms"]) == {"sternway zb-h1"} | theirs
    assert record["report"] == str(report)


def test_prints_a_table_with_the_schedule_that_is_fastest_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int | None, str]] = []
    monkeypatch.setattr(MovingBar, "update", lambda bar, *what: told.append(what))
    text = _demo(out=tmp_path)  # which one that is depends on this machine's times
    done = [done for done, _, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][1] == 3 + 4 * 2  # steps; then four ways, a round to warm up and one that is timed
    assert {total for _, total, _ in told} == {None, done[-1]}
    assert any("one process" in words for _, _, words in told)
    assert "First step's gradients equal to one process's" in text
    assert any(f"sternway {name}" in text for name in (*names(), "search"))


@pytest.mark.parametrize("name", ["nope", "dualpipe-v"])
def test_a_schedule_that_cannot_be_made_is_one_line(name: str, tmp_path: Path) -> None:
    arguments = ["demo", *SMALL, "--schedule", name, "--microbatches", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sternway", "demo", *SMALL, *arguments]


def test_what_fails_in_a_process_is_one_line_and_with_debug_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "make", lambda *args, **options: None)  # so that the ranks find the mistake
    arguments = ["demo", *SMALL, "--schedule", "nope", "--device", "cpu", "--out", str(tmp_path / "out")]
    short, long = (CliRunner().invoke(cli.app, [*arguments, *more]) for more in ([], ["--debug"]))
    assert short.exit_code == long.exit_code == 1
    assert short.stderr.strip().startswith("error: a process of the demo failed; got rank ")
    assert "Traceback" not in short.stderr + capfd.readouterr().err
    assert "_rank.py" in long.stderr
    assert not (tmp_path / "out").exists()


def children(process: int) -> list[int]:
    with suppress(OSError):  # it may be gone
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def is_running(process: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    return False


@pytest.mark.parametrize("more", [[], ["--chaos"]], ids=["demo", "chaos"])
def test_ctrl_c_is_one_line_and_leaves_nothing(more: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = command("--steps", "1000000", "--device", "cpu", "--out", str(out), *more)
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell runs with &
    )
    started: list[int] = []
    try:
        while len(started) < 2:
            assert process.poll() is None
            started = [rank for child in children(process.pid) for rank in children(child)]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
        stdout, stderr = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):  # a million steps would take long
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, stdout, stderr.strip()) == (130, "", "interrupted")
    end = time.monotonic() + 60  # those that were killed may take a moment
    while any(is_running(rank) for rank in started):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not out.exists()


def test_the_report_tells_the_story_on_one_page(browser: Browser, trained: tuple[dict[str, Any], Path]) -> None:
    record, report = trained
    browser.size(1400)
    browser.open(report)
    assert browser.run("[...document.querySelectorAll('.section h2')].map(h => h.textContent)") == [
        "What ran",
        "Time of a step",
        "Efficiency",
        "Peak memory of a process",
        "Loss",
        "One step",
    ]
    assert "torch" in browser.run("document.querySelector('.section.terms').innerText")
    bars = browser.run(
        "[...document.querySelectorAll('.section.bars')].map(s => [...s.querySelectorAll('tr')]"
        ".map(r => [r.cells[0].textContent, r.cells[2].textContent]))"
    )
    assert [name for name, _ in bars[0]] == ["one process", *record["step_ms"]]
    assert bars[1] == [[name, f"{share:.0%}"] for name, share in record["efficiency"].items()]
    assert "gradients are equal to those of one process" in browser.run(
        "document.querySelector('.verdict .good').textContent"
    )
    losses = browser.run("[...document.querySelectorAll('.curves circle title')].map(t => t.textContent)")
    assert losses[0] == f"loss: loss {record['losses'][0]:.4g} at step 0"
    for run in range(2):
        boxes = browser.run(f"document.querySelectorAll('[data-run=\"{run}\"] rect.event:not(.many)').length")
        assert boxes <= 2 * 4 * 3  # F, I and W of four microbatches on two ranks; a short one may be too narrow to draw
        assert browser.run(f"sternway.views.Report.active.runs[{run}].events.length") == 2 * 4 * 3
        kept = browser.run(f"[...document.querySelectorAll('[data-run=\"{run}\"] path.kept')].map(p => p.textContent)")
        assert len(kept) == 2
        assert all(words.endswith("iB") for words in kept)
    assert browser.run("document.querySelector('.run h3').textContent").endswith(f"{record['bubble_planned']:.1%}")
    assert browser.barriers() == []
    for width in (800, 1600):
        browser.size(width)
        assert browser.overflow() <= 0
