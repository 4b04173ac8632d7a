"""Each benchmark of the README runs as its command says, on a case so small that its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos.network import possible

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *arguments: str, program: str = "main.py") -> Any:
    command = [sys.executable, str(BENCHMARKS / name / program), "--json", *arguments]
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


def test_overhead() -> None:
    rows = run("pipeline", "--rounds", "1", program="overhead.py")["rows"]
    assert all(ratio > 0 for ratio in rows["GPT, 2 ranks"]["ratios"].values())


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


def test_plan_over_a_slow_link() -> None:
    if why := possible():
        pytest.skip(why)
    wanted = ["--bytes", "65536", "--rounds", "1", "--schedules", "gpipe"]
    row = run("plan", *wanted, program="link.py")["bytes"]["65536"]["gpipe"]
    assert row["step_ms"] >= 240, "eight microbatches sleep for 30 ms each on a rank"


def test_sharded() -> None:
    torchs, ours = "ScheduleInterleaved1F1B", "zb-h2"
    wanted = ["--dim", "16", "--rounds", "1", "--steps", "1", "--torchs", torchs, "--ours", ours]
    assert run("sharded", *wanted)


def test_split() -> None:
    assert run("split", "--rounds", "1", "--only", "d=64")
