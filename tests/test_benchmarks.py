"""Each benchmark of the README runs as its command says, on a case so small that its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *arguments: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / name / "main.py"), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_pipeline() -> None:
    ours = ["1f1b", "interleaved-1f1b", "zb-v"]
    wanted = ["--dims", "8", "--rounds", "1", "--steps", "1", "--torchs", "Schedule1F1B", "--ours", ",".join(ours)]
    (row,) = run("pipeline", *wanted)["rows"]
    assert row["schedules"] == {name: name for name in ours}
    assert all(row["efficiency"][name] > 0 for name in ["torch 1F1B", *(f"sternway {name}" for name in ours)])
    assert all(step["bound_ms"] > 0 for step in row["one_step"].values())


def test_plan() -> None:
    wanted = ["--asleep", "1", "--rounds", "1", "--steps", "2", "--all-steps", "4", "--schedules", "1f1b,zb-v"]
    (case,) = run("plan", *wanted)["cases"]
    assert set(case["step_ms"]) == set(case["planned_over_measured"]) == {"1f1b", "zb-v", "auto"}
    assert all(time >= 12 for time in case["step_ms"].values()), "four microbatches sleep for 3 ms each on a rank"


def test_plan_in_bytes() -> None:
    (case,) = run("plan", "--bytes", "--dim", "8", "--schedules", "1f1b")["cases"]
    assert all(0.99 < share <= 1.001 for share in case["predicted_over_measured"]["1f1b"])


def test_plan_within_less_memory() -> None:
    wanted = ["--within", "--shares", "0.6", "--asleep", "0.1", "--rounds", "1", "--steps", "1", "--all-steps", "3"]
    (case,) = run("plan", *wanted, "--schedules", "1f1b")["cases"]
    assert [row["schedule"] for row in case["rows"]] == ["1f1b", "auto"]
    assert all(row["fits"] and row["held_over_limit"] <= 1 for row in case["rows"])


def test_sharded() -> None:
    torchs, ours = "ScheduleInterleaved1F1B", "zb-h2"
    wanted = ["--dim", "16", "--rounds", "1", "--steps", "1", "--torchs", torchs, "--ours", ours]
    assert run("sharded", *wanted)


def test_split() -> None:
    assert run("split", "--rounds", "1", "--only", "d=64")
