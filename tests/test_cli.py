"""The command line, by what it prints and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sternway
import sternway._torch
from sternway import cli
from sternway._torch import Probe
from sternway.cli import _doctor

PROBES = sternway._torch.all_probes()


def _run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import atexit, runpy, sys\n"
        "heavy = ('torch', 'numpy', 'scipy', 'sympy', 'griffe', 'jinja2', 'yaml', 'multiprocessing')\n"
        "atexit.register(lambda: print('heavy:', [name for name in heavy if name in sys.modules]))\n"
        f"sys.argv = ['sternway', *{arguments}]\n"
        "runpy.run_module('sternway', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr  # 2: nothing asked for
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "sternway" in done.stdout


def test_python_m_is_the_same_command() -> None:
    command = [sys.executable, "-m", "sternway", "--version"]
    assert subprocess.check_output(command, text=True) == f"sternway {sternway.__version__}\n"


def test_version() -> None:
    assert _run("--version") == f"sternway {sternway.__version__}\n"


def test_doctor_names_what_is_there_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: None)
    report = json.loads(_run("doctor", "--json"))
    found = {finding["what"]: finding for finding in report["findings"]}
    assert report["well"]
    assert found["PyTorch"]["found"].startswith(torch.__version__)
    assert "gloo" in found["distributed backends"]["found"]
    assert found["C++ compiler"] == {
        "what": "C++ compiler",
        "found": "",
        "fix": "for torch.compile with Inductor on the CPU: apt install g++, or set CXX",
        "needed": False,
    }
    assert not found["browser"]["found"]
    assert found["ranks of a pipeline"]["found"].endswith(f"{os.cpu_count()} on the CPU, one for each core, over gloo")
    text = _run("doctor")
    assert "missing" in text
    assert "chromium" in text


@pytest.mark.parametrize(
    ("gpus", "backends", "words"),
    [
        (0, ["gloo"], "CORES on the CPU, one for each core, over gloo"),
        (4, ["gloo", "nccl"], "4 on GPUs, one each, over NCCL; CORES on the CPU, one for each core, over gloo"),
        (1, ["gloo"], "none on GPUs, as this torch has no NCCL; CORES on the CPU, one for each core, over gloo"),
        (4, ["nccl"], ""),
    ],
)
def test_doctor_says_how_many_ranks_a_pipeline_may_have(
    gpus: int, backends: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(_doctor, "_backends", lambda: backends)
    found = {finding.what: finding.found for finding in _doctor.examine()}
    assert found["ranks of a pipeline"] == words.replace("CORES", str(os.cpu_count()))


def test_doctor_fails_on_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    assert not json.loads(_run("doctor", "--json", code=1))["well"]


def test_doctor_warns_of_a_torch_that_is_newer_than_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(_run("doctor", "--json"))["warnings"] == []
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    report = json.loads(_run("doctor", "--json"))
    assert report["well"]
    assert report["warnings"] == ["torch 2.99.0 is newer than 2.15, the newest that sternway was tested with"]
    assert "warning: torch 2.99.0 is newer than 2.15" in _run("doctor")


def test_doctor_runs_every_probe() -> None:
    probes = json.loads(_run("doctor", "--json"))["probes"]
    assert [probe["name"] for probe in probes] == [probe.name for probe in PROBES]
    assert all(probe["fault"] is None for probe in probes)
    text = _run("doctor")
    assert f"Private names of torch: {len(probes)} of {len(probes)} do what we need" in text
    assert "counts in-place changes" not in text  # what passes is one word


def test_doctor_shows_a_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Probe("torch._gone", "is there", ("split", "pipeline"), lambda: [][0])
    monkeypatch.setattr(sternway._torch, "all_probes", lambda: (*PROBES, bad))
    report = json.loads(_run("doctor", "--json", code=1))
    assert not report["well"]
    assert report["probes"][-1] == {
        "name": "torch._gone",
        "features": ["split", "pipeline"],
        "expected": "is there",
        "fault": "IndexError: list index out of range",
    }
    text = _run("doctor", code=1)
    assert f"{len(PROBES)} of {len(PROBES) + 1} do what we need" in text
    assert "IndexError" in text
    assert "Tensor._version" not in text
    text = _run("doctor", "--all", code=1)
    assert text.index("torch._gone") < text.index("Tensor._version")  # failures first


def test_split_compares_with_plain_autograd_and_torch() -> None:
    threads = torch.get_num_threads()
    try:
        record = json.loads(_run("split", "--dim", "16", "--layers", "1", "--rounds", "2", "--json"))
        text = _run("split", "--dim", "16", "--layers", "1", "--rounds", "1")
    finally:
        torch.set_num_threads(threads)
    assert record["gradients_equal"]
    assert record["sternway"]["held_after_i"] < record["torch"]["held_after_i"]
    assert all(record["sternway"][key] > 0 for key in ("i_ms", "w_ms", "over_fused"))
    assert "Gradients equal to plain autograd's" in text
    rows = [line.replace("│", " ").split() for line in text.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["torch", "sternway"]
    for i, w, both, fused, ratio in ([float(cell) for cell in row[1:6]] for row in rows):
        assert both == pytest.approx(i + w)  # as they are shown
        assert ratio == round(both / fused, 2)


@pytest.mark.parametrize("command", ["split", "demo"])
def test_a_width_that_the_heads_do_not_divide_is_refused(command: str) -> None:
    assert "must be a multiple of 4" in _run(command, "--dim", "10", code=2)


@pytest.mark.parametrize(("example", "processes"), [("train_gpt.py", 2), ("train_sharded.py", 4)])
def test_example_trains_under_torchrun(example: str, processes: int) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(root / "examples" / example), "--steps", "11", "--dim", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in (lines[0], lines[-1]))
    assert last < first


def test_graph_without_a_target_writes_and_names_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["graph"])
    assert result.exit_code == 0, result.output
    assert "Wrote sternway-graph.html" in result.stderr
    assert (tmp_path / "sternway-graph.html").read_text().startswith("<!doctype html>")
    assert "└─ tokens" in result.stdout
    assert "qkv" not in result.stdout  # two levels


def test_graph_of_the_example(tmp_path: Path) -> None:
    example = str(Path(__file__).parents[1] / "examples" / "graph_demo.py")
    text = _run("graph", f"{example}:loss", "--text", "--depth", "1")
    assert "├─ head: " in text
    assert "└─ layers: " in text
    model = json.loads(_run("graph", f"{example}:model_and_sample", "--json"))
    assert model["format"] == "sternway.graph"
    assert any(node.get("module") == "layers.2.up" for node in model["nodes"])
    assert any("graph_demo.py" in node.get("source", "") for node in model["nodes"])
    _run("graph", f"{example}:loss", "--html", str(tmp_path / "a.html"))
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nonsense", "TARGET must be path/to/file.py:function; got 'nonsense'"),
        ("nowhere.py:loss", "'nowhere.py', which is not one"),
        ("FILE:absent", "got 'absent'. Fix: pass one of right, wrong"),
        ("FILE:wrong", "the function must return a loss, or a model and a sample; got a int"),
    ],
)
def test_graph_says_what_is_wrong_with_a_target(target: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def right(): ...\ndef wrong(): return 3\n")
    assert message in _run("graph", target.replace("FILE", str(file)), code=2)


def test_what_fails_is_one_line_and_with_debug_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def fails(): return 1 / 0\n")
    text = _run("graph", f"{file}:fails", code=1)
    got = f"ZeroDivisionError: division by zero at {file}:1"
    assert text == f"error: {file}:fails failed; got {got}. Fix: correct the code there\n"
    told = _run("graph", f"{file}:fails", "--debug", code=1)
    assert told.endswith(text)
    assert told.startswith("Traceback")
    assert "def fails(): return 1 / 0" in told


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_doctor, "doctor", interrupted)
    assert _run("doctor", code=130) == "interrupted\n"
