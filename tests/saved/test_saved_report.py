"""The report, by its figures and by what it prints; and `sternway saved`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import gpt
from saved_steps import moving
from torch import Tensor, nn
from typer.testing import CliRunner

from sternway import cli, saved
from sternway._bytes import parse_bytes, show_bytes
from sternway.errors import SavedError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp()).sin()  # type: ignore[no-any-return]


def _step(*policies: saved.Policy) -> saved.Report:
    torch.manual_seed(0)
    model = Two()
    with policies[0] as report:
        for policy in policies[1:]:
            policy.__enter__()
        loss = model(torch.randn(4, 8)).sum()
        for policy in reversed(policies[1:]):
            policy.__exit__(None, None, None)
    loss.backward()
    return report


def test_rows_by_module() -> None:
    rows = {row.module: row for row in _step(moving()).modules}
    assert list(rows) == ["first", "Two", "second"]
    assert rows["first"].moved_bytes == rows["first"].packed_bytes == 128  # its input
    assert rows["Two"].moved_bytes == 256  # what exp and sin save
    assert rows["second"].skipped == {"parameter": 256}
    assert rows["second"].deduplicated_bytes == 128  # its input is what exp saved
    assert rows["second"].moved_bytes == 0


def test_the_sum_adds_up() -> None:
    report = _step(moving(budget=200))
    total = report.total
    assert total.packs == 5
    assert total.packed_bytes == total.moved_bytes + total.kept_bytes + sum(total.skipped.values())
    assert (report.packed_bytes, report.moved_bytes, report.kept_bytes) == (640, 256, 128)
    assert report.deduplicated_bytes == 128
    assert report.skipped == {"parameter": 256}
    assert report.ratio == 1
    assert report.stall_seconds == 0
    assert report.peak_bytes == 384
    assert repr(report) == "Report(640 B packed, 256 B moved, peak 384 B)"
    assert str(report) == report.table()


def test_the_table() -> None:
    assert _step(moving(), saved.compress("bf16", min_bytes=0)).table() == (
        "module  packs  packed  moved  kept  again  encoded   into  ratio  stalled  skipped\n"
        "first       1   128 B   64 B   0 B    0 B    128 B   64 B    2.0\n"
        "Two         2   256 B  128 B   0 B    0 B    256 B  128 B    2.0\n"
        "second      2   256 B    0 B   0 B  128 B                                  parameter 256 B\n"
        "total       5   640 B  192 B   0 B  128 B    384 B  192 B    2.0           parameter 256 B\n"
        "peak on the device: 128 B"
    )


def test_json() -> None:
    record = json.loads(_step(moving()).to_json())
    assert record["format"] == "sternway.saved"
    assert record["total"]["moved_bytes"] == 384
    assert record["total"]["peak_bytes"] == 256
    assert [row["module"] for row in record["modules"]] == ["first", "Two", "second"]


def test_a_policy_that_moves_nothing_says_so_once(tmp_path: Path) -> None:
    policies = {
        r"already there .*Fix: pass to=\"disk\"": saved.offload(min_bytes=0),
        r"small .*Fix: pass a smaller min_bytes": saved.offload(to="disk", directory=tmp_path),
        r"elsewhere .*Fix: pass where=": saved.offload(to="disk", directory=tmp_path, min_bytes=0, where="third"),
    }
    for match, policy in policies.items():
        with policy:
            torch.ones(2)  # nothing is saved, so nothing can be said
        with pytest.warns(UserWarning, match=rf"saved.offload moved nothing; skipped: .*{match}"):
            _step(policy)
        _step(policy)
    _step(saved.offload(to="disk", directory=tmp_path, min_bytes=0))
    _step(saved.offload(to="disk", directory=tmp_path, min_bytes=0, budget="auto"))
    _step(saved.offload(), saved.keep())


@pytest.mark.filterwarnings("ignore:saved.offload moved nothing")
def test_reasons() -> None:
    assert set(_step(moving(min_bytes=200)).skipped) == {"parameter", "small"}
    assert set(_step(moving(where="first")).skipped) == {"parameter", "elsewhere"}
    assert set(_step(moving(), saved.keep(where="Two")).skipped) == {"parameter", "kept"}
    assert set(_step(saved.keep()).skipped) == {"kept"}
    assert set(_step(saved.offload(min_bytes=0)).skipped) == {"parameter", "already there"}


def test_keep_wins_wherever_it_stands() -> None:
    for policies in ((moving(), saved.keep("first")), (saved.keep("first"), moving())):
        rows = {row.module: row for row in _step(*policies).modules}
        assert rows["first"].moved_bytes == 0
        assert rows["Two"].moved_bytes == 256


def test_names_are_those_of_the_model_that_is_given() -> None:
    model = nn.Sequential(gpt(8, 2, heads=2), nn.Linear(8, 8))
    with moving(model=model, where="0.1.*") as report:
        x = torch.randn(1, 4, 8)
        for part in (*model[0], model[1]):
            x = part(x)
    moved = {row.module for row in report.modules if row.moved_bytes}
    assert moved == {f"0.1.{name}" for name in ("norm1", "qkv", "out", "norm2", "up", "down")}


def test_each_block_has_its_report_and_nested_ones_share_it() -> None:
    policy = moving()
    with policy as first, saved.keep("nothing") as inner:
        assert inner is first
    with policy as second:
        pass
    assert second is not first


def test_sizes() -> None:
    assert [parse_bytes(text, "x") for text in ("3", "4 KB", "1.5MiB", "2gib")] == [3, 4000, 3 * 2**19, 2**31]
    assert [show_bytes(count) for count in (0, 1023, 2**20, 3 * 2**40)] == ["0 B", "1023 B", "1.0 MiB", "3.0 TiB"]
    with pytest.raises(SavedError, match="x must be a size; got True"):
        parse_bytes(True, "x", SavedError)


# The command line


def _run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["saved", *arguments])
    assert result.exit_code == code, result.output
    return result.output


MINE = """
import torch

def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return model, torch.randn(32, 64)

def loss():
    model, x = parts()
    return model(x).sum()

def wrong():
    return 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


@pytest.mark.parametrize("function", ["parts", "loss"])
def test_the_command_runs_a_step_and_prints_json(mine: str, function: str) -> None:
    record = json.loads(_run(f"{mine}:{function}", "--to", "disk", "--budget", "0.5", "--json"))
    assert record["total"]["moved_bytes"] + record["total"]["kept_bytes"] == 2 * 64 * 32 * 4
    record = json.loads(_run(f"{mine}:{function}", "--to", "none", "--codec", "int8", "--steps", "1", "--json"))
    assert record["total"]["ratio"] > 3.5


def test_the_command_prints_a_table(mine: str) -> None:
    text = _run(f"{mine}:parts", "--to", "disk", "--where", "0")
    assert "module" in text
    assert "total" in text
    assert "Peak on the device" in text


def test_the_command_without_a_target_runs_the_demo(tmp_path: Path) -> None:
    record = json.loads(_run("--codec", "bf16", "--directory", str(tmp_path), "--to", "disk", "--steps", "1", "--json"))
    assert any(row["module"] == "blocks.3.up" for row in record["modules"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:saved.offload moved nothing")
def test_the_command_says_what_is_wrong(mine: str) -> None:
    text = _run(f"{mine}:wrong", code=2)
    assert "the function must return a loss, or a model and a sample; got a int" in text
    text = _run(f"{mine}:parts", "--to", "moon", code=2)
    assert "--to must be cpu, disk or none; got 'moon'" in text
    text = _run(f"{mine}:parts", "--to", "disk", "--where", "blocks.*", code=2)
    assert "--where must match a module that saves tensors; got 'blocks.*'. Fix: choose from 0, 1, 2" in text
