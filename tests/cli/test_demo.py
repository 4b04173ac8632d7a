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
from gloo import warm_up
from sternway import cli, schedule
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
    assert (
        set(record["efficiency"])
        == set(record["step_ms"])
        == {
            "sternway zb-h1",
            "torch Schedule1F1B",
            "torch ScheduleZBVZeroBubble",
        }
    )
    assert record["report"] == str(report)


def test_prints_a_table_with_the_schedule_that_is_fastest_here(tmp_path: Path) -> None:
    text = _demo(out=tmp_path)  # which one that is depends on this machine's times
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


def test_the_report_shows_the_step_the_loss_and_the_memory(
    browser: Browser, trained: tuple[dict[str, Any], Path]
) -> None:
    record, report = trained
    browser.open(report)
    tabs = browser.run("[...document.querySelectorAll('[role=tab]')].map(t => t.textContent)")
    assert tabs == ["Timeline", "Curves"]
    planned, measured = (
        browser.run(f"document.querySelectorAll('#timeline .series')[{i}].querySelectorAll('rect.event').length")
        for i in range(2)
    )
    assert planned == measured == 2 * 4 * 3  # F, I and W of four microbatches on two ranks
    hover = browser.run("document.querySelector('#timeline rect.event title').textContent")
    assert hover.startswith("0F0: 0 to ")
    assert hover.endswith(" ms, rank 0")
    width = "document.querySelector('#timeline svg').width.baseVal.value"
    before = browser.run(width)
    browser.press("+")
    assert browser.run(width) > before
    browser.run("document.querySelectorAll('[role=tab]')[1].click()")
    lines = browser.run("[...document.querySelectorAll('#curves svg')].map(s => s.querySelectorAll('polyline').length)")
    assert lines == [1, 4]  # the loss; memory planned and measured on two ranks
    shown = browser.run(
        "[...document.querySelectorAll('#curves svg')[0].querySelectorAll('title')].map(t => t.textContent)"
    )
    assert shown[0] == f"loss: loss {record['losses'][0]:.4g} at step 0"
