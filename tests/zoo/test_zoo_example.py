"""``examples/finetune_hf.py`` under torchrun: trained, saved, resumed, and loaded by plain transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path, *options: str) -> list[str]:
    (folder / "sitecustomize.py").write_text("import zoo.libraries\n")  # also in the processes that torchrun starts
    path = os.pathsep.join([str(folder), str(ROOT / "tests"), str(ROOT / "src")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "finetune_hf.py"), "--out", str(folder / "out"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_evaluated(lines: list[str]) -> None:
    found = re.search(r"evaluated: (\S+) here, (\S+) by transformers alone", "\n".join(lines))
    assert found is not None
    assert found[1] == found[2]


def test_full_and_resumed(tmp_path: Path) -> None:
    first = run(tmp_path, "--steps", "4", "--save-every", "2")
    assert [line.partition(":")[0] for line in first if line.startswith("step")] == [f"step {i}" for i in range(4)]
    assert_evaluated(first)
    second = run(tmp_path, "--steps", "6", "--save-every", "2")
    assert "going on from step 4" in second
    assert [line.partition(":")[0] for line in second if line.startswith("step")] == ["step 4", "step 5"]
    assert_evaluated(second)


def test_adapters(tmp_path: Path) -> None:
    assert_evaluated(run(tmp_path, "--lora", "--steps", "3"))
    assert {file.name for file in (tmp_path / "out" / "tuned").iterdir()} >= {"adapter_model.safetensors"}
    assert not list((tmp_path / "out" / "tuned").glob("model*"))
