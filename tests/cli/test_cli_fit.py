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


def test_what_does_not_fit_ends_with_1(program: Path) -> None:
    code, text = run(f"{program}:build", "--memory", "1KB", "--schedule", "1f1b", "--json")
    found = json.loads(text)
    assert code == 1
    assert found["limit"] == 1000
    assert not any(way["fits"] for way in found["ways"])
    assert found["parameters"] == 4 * (64 * 64 + 64)
    assert found["verdict"].startswith("It does not fit: the smallest way")


def test_a_function_that_reads_values_is_an_error(program: Path) -> None:
    code, text = run(f"{program}:reads")
    assert code == 1
    assert "could not be called on tensors without memory; got RuntimeError: Tensor.item()" in text


def test_an_option_that_makes_no_sense_is_misuse(program: Path) -> None:
    for option, value in (("--memory", "lots"), ("--optimizer", "adamax"), ("--schedule", "nope")):
        code, text = run(f"{program}:build", option, value)
        assert code == 2, text
        assert value in text
