"""Every claim of the pages against a table made apart from the atlas: precision 0.99, recall 0.95, kind by kind."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sternway import atlas

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "atlas"
EVERYTHING = '''\
"""A module with one of everything that the findings look for."""
import asyncio
import os
import pickle
import sqlite3
import threading
import time
from functools import cache

import torch
from torch._C import _private

HANDLERS = {"a": lambda: 1, "b": lambda: 2, "c": lambda: 3}
REGISTRY = {}
SEEN = []
NAMES = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
count = 0
api_key = "9f8a7c6b5d4e3f2a"


def register(name, function):
    REGISTRY[name] = function
    SEEN.append(name)


def bump():
    global count
    count += 1


@cache
def cached():
    raise ValueError("never")


async def waits():
    time.sleep(1)


def loops(rows, database):
    whole = torch.zeros(0)
    for row in rows:
        row.sum().item()
        whole = torch.cat([whole, row])
        scratch = torch.empty(3)
        rows.pop(0)
        if row.name in NAMES:
            database.execute(f"SELECT * FROM t WHERE n = {row.name}")
    return [one.item() for one in whole], scratch


def starts():
    thread = threading.Thread(target=bump)
    thread.start()
    asyncio.run(waits())
    return open(os.environ["WHERE"]), pickle.loads(b""), torch._C._nothing


def not_found(rows, pickle):
    rows.append(1)
    pickle.loads(b"")
    first = rows[0].item()
    for row in range(first):
        count = row
    return count
'''
TRAINING = '''\
"""A training program with one of every call that pages name."""
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x


@torch.compile
def scaled(x):
    return x * 2


def rows(batch):
    found = []
    for row in batch:
        found.append(torch.relu(row))
    return found


def train(model, batches):
    dist.init_process_group("gloo")
    model = torch.compile(model)
    model.register_full_backward_hook(print)
    register_multi_grad_hook(list(model.parameters()), print)
    nn.modules.module.register_module_forward_hook(print)
    for batch in batches:
        with torch.autocast("cpu"), save_on_cpu():
            out = checkpoint(model, rows(batch))
        loss = functional.cross_entropy(out, batch)
        loss = loss + nn.MSELoss()(out, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
'''
OTHER = '''\
"""No training: torch is not imported here."""


def send(request):
    request.register_hook("response", print)
    request.backward()
'''
TESTS = '''\
"""Tests of it."""
from everything import helper


def test_direct():
    assert helper(1) == 2
'''
HELPER = '''\
"""What the test calls."""


def helper(x):
    return _inner(x)


def _inner(x):
    return x + 1
'''


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARK))
    spec = importlib.util.spec_from_file_location("atlas_benchmark", BENCHMARK / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["atlas_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARK))


def test_one_of_everything_is_found_and_nothing_else(benchmark: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "everything"
    source.mkdir()
    (source / "__init__.py").write_text(HELPER)
    (source / "findings.py").write_text(EVERYTHING)
    (source / "program.py").write_text(TRAINING)
    (source / "other.py").write_text(OTHER)
    (source / "test_it.py").write_text(TESTS)
    assert atlas.build(source, tmp_path / "out").ok
    rows = {row.kind: row for row in benchmark.compare(source, tmp_path / "out")}
    wrong = [row for row in rows.values() if (row.precision, row.recall) != (1.0, 1.0)]
    assert wrong == []
    kinds = """
    registry/dispatch table/cache/coroutine/state: changed in functions/state: assigned by global/starts/private name
    performance: blocking call in async code/performance: device synchronization in a loop/raises/layer/test reaches
    performance: quadratic: grows by copying/performance: allocation in a loop/performance: linear search in a loop
    performance: quadratic: at the front of a list/security finding/reached by a test/usage excerpt/module docstring
    """
    training = {
        "hook": 3,
        "saved tensors": 2,
        "loss": 2,
        "compile": 2,
        "backward": 1,
        "gradient clipping": 1,
        "mixed precision": 1,
        "process group": 1,
        "activation checkpoint": 1,
    }
    assert {kind: rows[f"training: {kind}"].claimed for kind in training} == training
    assert rows["performance: loop in a hot path"].claimed == 1  # rows(), which train() calls in its loop
    assert {kind.strip() for line in kinds.strip().split("\n") for kind in line.split("/")} <= set(rows)
    assert rows["security finding"].claimed == 4  # pickle, a path from the environment, SQL, a key
    assert rows["performance: device synchronization in a loop"].claimed == 2


def test_our_own_package(benchmark: ModuleType, tmp_path: Path) -> None:
    source = ROOT / "src" / "sternway"
    assert atlas.build(source, tmp_path / "out", include=["*.py"]).ok
    rows = benchmark.compare(source, tmp_path / "out")
    assert len(rows) > 40
    assert [row for row in rows if row.precision < 0.99 or row.recall < 0.95] == []
