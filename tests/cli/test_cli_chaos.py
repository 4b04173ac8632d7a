"""``sternway demo --chaos``: a process is killed under torchrun, and training ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sternway.cli import app

SMALL = ["--steps", "8", "--dim", "16", "--layers", "2", "--microbatches", "2"]


def test_the_chaos_demo(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--chaos", *SMALL, "--kills", "1", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    record = json.loads(result.stdout)
    assert record["kills"] == 1
    assert record["bit_identical"]
    assert [life["resumed"] for life in record["lives"]] in ([0, 0], [0, 4])
