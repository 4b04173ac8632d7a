"""A pytest plugin: PyTorch's own tests, with a part of torch replaced by ours.

    python -m pytest -p replaced --way split test_autograd.py       # with this folder on PYTHONPATH

The ways are in ``WAYS``; ``judge.py`` runs the suites in each and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch


@contextmanager
def split_backward() -> Iterator[None]:
    """Every ``backward()`` is done in two halves, I then W, where the split offers what is asked for."""
    from sternway import split
    from sternway._torch import require

    for feature in ("split", "split.checkpoint"):  # probes run backwards of their own
        require(feature)
    plain = torch.autograd.backward

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        asks_more = retain_graph or create_graph or grad_variables is not None or inputs is not None
        from_us = sys._getframe(1).f_globals["__name__"].startswith("sternway.")
        if asks_more or from_us or torch.compiler.is_compiling():
            plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        _, pending = split.backward_input(tensors, grad_tensors)
        pending.run()

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


@contextmanager
def dropin_graph() -> Iterator[None]:
    """The names of ``torch.autograd.graph`` are those of our drop-in."""
    import torch.utils.checkpoint  # a class in it is made from torch's names; those stay

    from sternway.dropin import autograd_graph

    ours = {name: getattr(autograd_graph, name) for name in autograd_graph.__all__}
    with mock.patch.multiple(torch.autograd.graph, **ours):
        yield


@contextmanager
def dropin_stage() -> Iterator[None]:
    """The functions of ``torch.distributed.pipelining._backward`` are those of our drop-in."""
    from torch.distributed.pipelining import _backward

    from sternway.dropin import pipelining_backward

    ours = {name: getattr(pipelining_backward, name) for name in pipelining_backward.__all__}
    with mock.patch.multiple(_backward, **ours):
        yield


def installed() -> AbstractContextManager[Any]:
    """``split.install()``."""
    from sternway import split

    return split.install()


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "split": split_backward,
    "autograd_graph": dropin_graph,
    "pipelining_backward": dropin_stage,
    "install": installed,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--way", choices=sorted(WAYS), default="torch", help="what of torch is replaced by ours")
    parser.addoption("--outcomes", type=Path, help="a file for the outcome of every test, and why it failed")


def pytest_configure(config: pytest.Config) -> None:
    replaced = WAYS[config.getoption("--way")]()
    replaced.__enter__()
    config.add_cleanup(lambda: replaced.__exit__(None, None, None))
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.getoption("--outcomes")))


class _Recorder:
    """Writes the outcome of every test to a file, after each: a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = report.longreprtext.splitlines()[-1:] if report.failed else []
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message.splitlines()[:3] if crash is not None else why
            row = {"test": report.nodeid, "outcome": report.outcome, "why": " | ".join(text)[:400]}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
