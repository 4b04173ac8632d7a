"""The workflows of the code host run what the Makefile has, and only the job that publishes may."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT

yaml = pytest.importorskip("yaml", reason="no pyyaml: pip install -e '.[dev]'")
FOLDER = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text()


def _jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.name)
def test_what_runs_exists(path: Path) -> None:
    commands = [step["run"] for job in _jobs(path).values() for step in job["steps"] if "run" in step]
    targets = [target for command in commands for target in re.findall(r"^make (\w+)", command)]
    assert commands or targets
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)


def test_lint_tests_and_docs_are_run() -> None:
    commands = " ".join(step.get("run", "") for job in _jobs(FOLDER / "ci.yml").values() for step in job["steps"])
    assert all(f"make {target}" in commands for target in ("lint", "test", "docs"))


def test_only_publishing_may_publish() -> None:
    for path in FOLDER.glob("*.yml"):
        text = yaml.safe_load(path.read_text())
        assert text["permissions"] == {"contents": "read"}
        allowed = [name for name, job in text["jobs"].items() if job.get("permissions", {}).get("id-token") == "write"]
        assert allowed == (["publish"] if path.name == "release.yml" else [])
    publish = _jobs(FOLDER / "release.yml")["publish"]
    assert publish["environment"] == "pypi"
    assert not re.search(r"secrets\.|password", (FOLDER / "release.yml").read_text())  # trusted: no token
