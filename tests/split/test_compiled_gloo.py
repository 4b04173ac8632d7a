"""Compiled stages and DDP on real gloo processes; the entry point in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import torch
from models import gpt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compare import assert_same_grads
from compiled import compiled
from gloo import on_ranks
from sternway import schedule, split
from sternway.pipeline import Pipeline

ROOT = Path(__file__).parents[2]


def _models(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(8, 1, heads=2) for _ in range(count)]


def _pipeline(rank: int) -> None:
    for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        plan = schedule.make(name, ranks=2, microbatches=4)
        mine, reference = _models(plan.num_stages), nn.Sequential(*_models(plan.num_stages))
        held = {index: compiled(mine[index]) for index in plan.placement[rank]}
        pipe = Pipeline(held, schedule=plan, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(1)
        for _ in range(2):
            x, target = torch.randn(8, 4, 8), torch.randn(8, 4, 8)
            result = pipe.step(x, target=target, loss_everywhere=True)
            loss = nn.functional.mse_loss(reference(x), target)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach())
        for index in held:
            assert_same_grads(mine[index], reference[index], rtol=1e-3, atol=1e-5)
        pipe.close()


def test_compiled_stages_on_two_ranks() -> None:
    on_ranks(2, _pipeline, timeout=300)


def _ddp(rank: int, inside: bool) -> None:
    module, theirs = gpt(8, 2, heads=2), gpt(8, 2, heads=2)
    theirs.load_state_dict(module.state_dict())
    reference = DistributedDataParallel(theirs)
    # Dynamo breaks a compiled DDP module into buckets; a compiled module in DDP stays whole.
    ours = DistributedDataParallel(compiled(module)) if inside else compiled(DistributedDataParallel(module))
    torch.manual_seed(rank)
    for _ in range(2):
        x = torch.randn(2, 4, 8, requires_grad=True)
        their_x = x.detach().clone().requires_grad_()
        reference(their_x).square().sum().backward()
        grad, pending = split.backward_input(ours(x).square().sum(), None, x)
        torch.testing.assert_close(grad, their_x.grad)
        assert len(pending.deferred) == 16
        pending.run()
        assert_same_grads(module, theirs, rtol=1e-4, atol=1e-5)


def test_a_compiled_module_in_ddp() -> None:
    on_ranks(2, _ddp, True)


def test_a_compiled_ddp_module() -> None:
    on_ranks(2, _ddp, False)


def test_the_backend_is_found_by_its_name_with_nothing_imported(tmp_path: Path) -> None:
    """As after ``pip install``, which writes the entry points of pyproject.toml into such a folder."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "sternway-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sternway\nVersion: 0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{n} = {t}" for n, t in each.items()) for group, each in points.items()]
    (info / "entry_points.txt").write_text("\n\n".join(lines))
    code = """
import torch
layer = torch.nn.Linear(4, 4)
fast = torch.compile(layer, backend="sternway", options={"inner": "eager"})
fast(torch.ones(2, 4)).sum().backward()
assert layer.weight.grad is not None
from sternway import split
print(split.inspect(layer)[0].late)
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "2"
