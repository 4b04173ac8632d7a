"""``sternway fit`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sternway.cli import app

PROGRAM = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.zeros(8, 64)

def blocks():
    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return nn.Sequential(*(block() for _ in range(4))), torch.zeros(8, 64)

def reads():
    return nn.Linear(2, 2), torch.zeros(1).item()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(target: str, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fit", target, "--ranks", "2", "--microbatches", "4", *options])
    return result.exit_code, result.output


def test_shows_ranks_and_schedules(program: Path) -> None:
    code, text = run(f"{program}:build", "--memory", "1GB", "--schedule", "1f1b")
    assert code == 0
    assert "activations" in text
    assert "It fits: 1f1b needs" in text
    assert "With 4 ranks: 1f1b needs" in text
    assert "With half as many rows: 1f1b needs" in text


def test_four_microbatches_for_each_rank_unless_given(program: Path) -> None:
    result = CliRunner().invoke(app, ["fit", f"{program}:build", "--ranks", "2", "--schedule", "1f1b"])
    assert result.exit_code == 0
    assert "16,640 parameters, 8 microbatches, by 1f1b" in result.output


def test_what_does_not_fit_ends_with_1(program: Path) -> None:
    code, text = run(f"{program}:build", "--memory", "1KB", "--schedule", "1f1b", "--json")
    found = json.loads(text)
    assert code == 1
    assert found["limit"] == 1000
    assert not any(way["fits"] for way in found["ways"])
    assert found["parameters"] == 4 * (64 * 64 + 64)
    assert found["verdict"].startswith("It does not fit: the smallest way")
    smallest, less = min(way["peak"] for way in found["ways"]), found["changes"]
    assert less["4 ranks"]["peak"] < smallest
    assert less["half as many rows"]["peak"] < smallest
    assert found["largest"][0] == {
        "what": "0.weight",
        "shape": [64, 64],
        "dtype": "float32",
        "nbytes": 2**14,
        "count": 1,
    }
    assert found["largest"][-1] == {
        "what": "activation",
        "shape": [8, 64],
        "dtype": "float32",
        "nbytes": 2**11,
        "count": 1,
    }


def test_what_offload_would_change(program: Path) -> None:
    _, text = run(f"{program}:blocks", "--schedule", "gpipe", "--json")
    plain = next(way for way in json.loads(text)["ways"] if not way["recompute"])
    assert plain["moved"] == 0
    code, text = run(f"{program}:blocks", "--schedule", "gpipe", "--memory", str(plain["peak"] - 1), "--json")
    ways = json.loads(text)["ways"]
    (moved,) = [way for way in ways if way["moved"] and not way["recompute"]]
    assert code == 0
    assert moved["fits"]
    assert moved["schedule"] == "gpipe-offloaded"
    assert moved["peak"] < plain["peak"]


def test_a_function_that_reads_values_is_an_error(program: Path) -> None:
    code, text = run(f"{program}:reads")
    assert code == 1
    assert "could not be called on tensors without memory; got RuntimeError: Tensor.item()" in text


def mesh(target: str, text: str, *options: str) -> tuple[int, str]:
    given = ["fit", target, "--microbatches", "4", "--schedule", "1f1b", "--mesh", text, *options]
    result = CliRunner().invoke(app, given)
    return result.exit_code, result.output


def test_a_mesh_divides_parameters_and_gathers_them(program: Path) -> None:
    found = {}
    for text in ("pp=2", "dp=4,pp=2", "pp=2,dp_shard=4"):
        code, output = mesh(f"{program}:build", text, "--json")
        assert code == 0
        found[text] = next(way for way in json.loads(output)["ways"] if not way["recompute"])["ranks"][0]
    plain, copies, sharded = found.values()
    assert plain == copies
    parameters = 2 * 4 * (64 * 64 + 64)
    assert (plain["parameters"], plain["optimizer"], plain["gathered"]) == (parameters, 2 * parameters, 0)
    assert (sharded["parameters"], sharded["optimizer"]) == (parameters / 4, parameters / 2)
    assert sharded["gathered"] == 2 * parameters, "whole, with gradients that are not reduced yet"


def test_a_mesh_that_is_not_understood_is_misuse(program: Path) -> None:
    for text, options, said in (
        ("pp=2,tp=2", (), "got tp=2; a plain model does not say which weights"),
        ("pp=2,pp=2", (), "--mesh must be sizes by dimension; got pp=2"),
        ("pp", (), "--mesh must be sizes by dimension; got pp"),
        ("dp_shard=2", (), "the ranks of the pipeline must be given; got none"),
        ("pp=2", ("--ranks", "4"), "must be the same; got 4 and 2"),
    ):
        code, output = mesh(f"{program}:build", text, *options)
        assert code == 2
        assert said in " ".join(output.split()), output


def test_an_option_that_makes_no_sense_is_misuse(program: Path) -> None:
    for option, value in (("--memory", "lots"), ("--optimizer", "adamax"), ("--schedule", "nope")):
        code, text = run(f"{program}:build", option, value)
        assert code == 2, text
        assert value in text
