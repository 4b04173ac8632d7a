"""``sternway demo --chaos``: a process is killed under torchrun, and training ends with the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sternway.cli import app
from sternway.cli._progress import MovingBar

SMALL = ["--steps", "8", "--dim", "16", "--layers", "2", "--microbatches", "2"]


def test_the_chaos_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    done: list[int] = []
    monkeypatch.setattr(MovingBar, "say", lambda bar, words: said.append(words))
    monkeypatch.setattr(MovingBar, "update", lambda bar, steps, total, words: done.append(steps))
    result = CliRunner().invoke(app, ["demo", "--chaos", *SMALL, "--kills", "1", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    record = json.loads(result.stdout)
    assert record["kills"] == 1
    assert record["bit_identical"]
    assert [life["resumed"] for life in record["lives"]] in ([0, 0], [0, 4])
    assert len(said) == 2
    assert re.fullmatch(r"rank [01] killed in step \d", said[0])
    assert re.fullmatch(rf"back after \d+\.\d s: resumed at step {record['lives'][1]['resumed']}", said[1])
    assert done[:8] == list(range(1, 9))  # undisturbed
    assert done[-1] == 16
