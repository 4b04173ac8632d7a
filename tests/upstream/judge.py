"""PyTorch's own tests as the judge: each suite as it is, and with a part of torch replaced by ours.

    make upstream TORCH_TESTS=~/pytorch/test          # a checkout of the release that is installed

A test that passes on torch and not on ours is a difference. Every difference that we know is in ``explained.toml``,
with its reason. Another one is run again, alone; if it is there again, the exit code is 1. One that has gone is
reported, so that the list stays true.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
EXPLAINED = HERE / "explained.toml"
PIPELINING = "distributed/pipelining"
IN_ONE_PROCESS = ("schedule", "stage", "microbatch", "pipe", "transformer", "unflatten")  # the others need GPUs


@dataclass(frozen=True)
class Suite:
    """Files of PyTorch's ``test`` folder, run together in one way of ``replaced.WAYS``."""

    way: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.files)} ({self.way})"


SUITES = [
    Suite("split", ("test_autograd.py",)),
    Suite("autograd_graph", ("test_autograd.py",)),
    Suite("split", ("test_nn.py",)),
    Suite("split", ("nn/test_convolution.py",)),
    Suite("split", ("test_modules.py",)),
    Suite("pipelining_backward", (f"{PIPELINING}/test_backward.py",)),
    Suite("install", tuple(f"{PIPELINING}/test_{name}.py" for name in IN_ONE_PROCESS)),
]


@dataclass(frozen=True)
class Explanation:
    """Why some tests differ in one way. ``tests`` are patterns for names, such as ``test_nn.py::TestNN::test_*``."""

    way: str
    reason: str
    tests: tuple[str, ...]


def explanations(path: Path = EXPLAINED) -> list[Explanation]:
    rows = tomllib.loads(path.read_text())["difference"]
    return [Explanation(row["way"], row["reason"], tuple(row["tests"])) for row in rows]


@dataclass
class Verdict:
    """One suite on torch and on ours."""

    suite: Suite
    torch: int
    ours: int
    explained: list[str] = field(default_factory=list)
    new: dict[str, str] = field(default_factory=dict)  # test, and how it failed
    gone: list[str] = field(default_factory=list)  # patterns in the list that no longer fit any difference

    @property
    def row(self) -> str:
        numbers = (self.torch, self.ours, len(self.explained), len(self.new))
        return f"| {', '.join(f'`{file}`' for file in self.suite.files)} | {self.suite.way} | " + " | ".join(
            [f"{number:,}" for number in numbers]
        )


HEADER = (
    "| suite | way | torch passes | ours passes | explained | not explained |\n| --- | --- | --- | --- | --- | --- |"
)


def judge(suite: Suite, theirs: dict[str, str], ours: dict[str, str], known: Iterable[Explanation]) -> Verdict:
    """Compare the outcomes of a suite: by test, "" if it passed, and otherwise why not."""
    verdict = Verdict(suite, *(sum(not why for why in each.values()) for each in (theirs, ours)))
    patterns = [pattern for each in known if each.way == suite.way for pattern in each.tests]
    fitting = [pattern for pattern in patterns if pattern.split("::")[0] in suite.files]
    differing = {test: ours.get(test, "did not run") for test, why in theirs.items() if not why and ours.get(test, "-")}
    for test, why in differing.items():
        if any(fnmatchcase(test, pattern) for pattern in fitting):
            verdict.explained.append(test)
        else:
            verdict.new[test] = why
    verdict.gone = [pattern for pattern in fitting if not any(fnmatchcase(test, pattern) for test in differing)]
    return verdict


def run(folder: Path, files: Iterable[str], way: str, jobs: int, chosen: str = "") -> dict[str, str]:
    """The outcome of each test that was not skipped: "" if it passed, and otherwise why not."""
    paths = [str(HERE), str(folder), str(folder / PIPELINING), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        outcomes = Path(place) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", "replaced", "--way", way, "--outcomes", str(outcomes), "-q"]
        command += ["--noconftest", "-c", os.devnull, "--rootdir", str(folder)]
        command += ["-n", str(jobs if jobs > 1 else 0)]  # a single worker would import torch once more
        command += ["-p", "no:cacheprovider", "-p", "no:logging", "-k", chosen]  # some tests log with wrong arguments
        done = subprocess.run([*command, *files], cwd=folder, env=environment, capture_output=True, text=True)
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    if not rows and not (chosen and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{', '.join(files)} ({way}): no test ran\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    found: dict[str, str] = {}
    for row in rows:
        if row["outcome"] == "failed":
            found[row["test"]] = row["why"] or "failed"
        elif row["outcome"] == "passed":
            found.setdefault(row["test"], "")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder test of a checkout of PyTorch")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="suites whose name has this word")
    parser.add_argument("-k", dest="chosen", default="", help="tests that fit, as of pytest")
    parser.add_argument("--explained", type=Path, default=EXPLAINED, help="the list of differences that are known")
    asked = parser.parse_args(arguments)
    asked.folder = asked.folder.resolve()
    if not any((asked.folder / suite.files[0]).exists() for suite in SUITES):
        parser.error(f"{asked.folder} must be the folder test of a checkout of PyTorch")
    known = explanations(asked.explained)
    plain: dict[tuple[str, ...], dict[str, str]] = {}
    verdicts = []
    for suite in SUITES:
        files = tuple(file for file in suite.files if (asked.folder / file).exists())
        if asked.only not in str(suite) or not files:
            continue
        if files not in plain:
            plain[files] = run(asked.folder, files, "torch", asked.jobs, asked.chosen)
        ours = run(asked.folder, files, suite.way, asked.jobs, asked.chosen)
        if new := judge(suite, plain[files], ours, known).new:
            ours = ours | _again(asked.folder, new, suite.way)
        verdicts.append(judge(Suite(suite.way, files), plain[files], ours, known))
        _say(verdicts[-1], whole=not asked.chosen)
        print(verdicts[-1].row + " |", flush=True)  # noqa: T201 - each as it is known: all take an hour
    print(HEADER, *(verdict.row + " |" for verdict in verdicts), sep="\n")  # noqa: T201 - a program
    return 1 if any(verdict.new for verdict in verdicts) else 0


def _again(folder: Path, failed: dict[str, str], way: str) -> dict[str, str]:
    """Run tests once more, with nothing beside them: some of PyTorch's fail if they take long."""
    found = run(folder, tuple(failed), way, 1)
    for test, why in failed.items():
        if found.get(test) == "":
            print(f"ONCE {way}: {test} failed, and passes when it is run again\n     {why}", flush=True)  # noqa: T201
    return found


def _say(verdict: Verdict, *, whole: bool) -> None:
    for test, why in verdict.new.items():
        print(f"NEW  {verdict.suite.way}: {test}\n     {why}", flush=True)  # noqa: T201
    for pattern in verdict.gone if whole else ():
        print(f"GONE {verdict.suite.way}: {pattern}: take it off the list", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
