"""The judge itself, on a suite of our own in place of PyTorch's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import judge
import pytest
from judge import Explanation, Suite, explanations, main
from replaced import WAYS

SUITE = """
import os
import unittest
import torch

class TestSmall(unittest.TestCase):
    def test_equal(self):
        weight = torch.ones(3, requires_grad=True)
        (2 * weight).sum().backward()
        self.assertEqual(weight.grad.tolist(), [2.0, 2.0, 2.0])

    def test_it_is_torchs(self):
        self.assertTrue(torch.autograd.backward.__module__.startswith("torch."))

    def test_slow_at_first(self):
        before = os.path.exists("ran")
        if not torch.autograd.backward.__module__.startswith("torch."):
            open("ran", "w").close()
            self.assertTrue(before, "it took too long")

    def test_broken(self):
        self.fail("also on torch")

    @unittest.skip("not here")
    def test_skipped(self):
        pass
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("test")
    (folder / "test_small.py").write_text(SUITE)
    return folder


RUN = cache(judge.run)  # four processes: two judgements of the same run are as good


@pytest.fixture
def folder(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(judge, "SUITES", [Suite("split", ("test_small.py",)), Suite("split", ("test_absent.py",))])
    monkeypatch.setattr(judge, "run", RUN)
    return small


def _explained(folder: Path, *tests: str) -> list[str]:
    path = folder / "explained.toml"
    path.write_text(f'[[difference]]\nway = "split"\nreason = "on purpose"\ntests = {list(tests)}\n')
    return [str(folder), "--jobs", "1", "--explained", str(path)]


def test_a_new_difference_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_explained(folder, "test_small.py::TestSmall::test_equal")) == 1
    out = capsys.readouterr().out
    assert "NEW  split: test_small.py::TestSmall::test_it_is_torchs\n     AssertionError: False is not true" in out
    assert "GONE split: test_small.py::TestSmall::test_equal: take it off the list" in out
    assert out.endswith("| `test_small.py` | split | 3 | 2 | 0 | 1 |\n")


def test_an_explained_one_does_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_explained(folder, "test_small.py::TestSmall::test_it_*")) == 0
    out = capsys.readouterr().out
    assert "ONCE split: test_small.py::TestSmall::test_slow_at_first failed, and passes when it is run again\n" in out
    assert "it took too long" in out
    assert out.endswith("| `test_small.py` | split | 3 | 2 | 1 | 0 |\n")


def test_a_test_that_does_not_run_is_a_difference() -> None:
    verdict = judge.judge(Suite("split", ("a.py",)), {"a.py::one": "", "a.py::two": ""}, {"a.py::one": ""}, [])
    assert verdict.new == {"a.py::two": "did not run"}


def test_another_way_is_not_explained() -> None:
    known = [Explanation("install", "another way", ("a.py::*",))]
    verdict = judge.judge(Suite("split", ("a.py",)), {"a.py::one": ""}, {"a.py::one": "broken"}, known)
    assert verdict.new == {"a.py::one": "broken"}
    assert verdict.gone == []


def test_a_folder_without_suites(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])


def test_the_list() -> None:
    """Each entry is of a suite that is run, in a way that there is, and has a reason."""
    files = {(suite.way, file) for suite in judge.SUITES for file in suite.files}
    for each in explanations():
        assert each.way in WAYS
        assert each.reason.endswith(".")
        assert {(each.way, test.split("::")[0]) for test in each.tests} <= files
    assert {suite.way for suite in judge.SUITES} == WAYS.keys() - {"torch"}
