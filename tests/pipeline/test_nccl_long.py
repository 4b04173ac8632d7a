"""Real NCCL between small GPUs for many steps: memory does not grow, buffers are not reused too early, runs resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from small_gpus import on_small_gpus
from sternway import schedule
from sternway.pipeline import Pipeline
from sternway.pipeline.transport._payload import TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]

DIM = 32


def model(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(gpt(DIM, 1, heads=2) for _ in range(blocks))).cuda()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8, DIM, device="cuda"), torch.randn(rows, 8, DIM, device="cuda")


# Memory


def settled(wanted: int) -> int:
    """The bytes allocated, when they are as few as wanted, or after a while: threads drop what they have sent."""
    end, found = time.monotonic() + (30 if wanted else 1), torch.cuda.memory_allocated()
    while found > wanted and time.monotonic() < end:
        time.sleep(0.01)
        found = min(found, torch.cuda.memory_allocated())
    return found


def run_many_steps(rank: int, ranks: int) -> None:
    pipe = Pipeline(model(2 * ranks), schedule="zb-v", n_microbatches=2 * ranks, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), 1e-3)
    allocated = {}
    for step in range(1, 201):
        x, target = batch(2 * ranks)
        pipe.step(x, target=target, record=step % 2 == 0)
        optimizer.step()
        optimizer.zero_grad()
        del x, target
        if step in (20, 200):
            torch.cuda.synchronize()
            allocated[step] = settled(allocated.get(20, 0))
    assert allocated[200] <= allocated[20], allocated
    pipe.close()


def test_memory_after_200_steps_is_that_after_20() -> None:
    on_small_gpus(2, run_many_steps, 2)


# Buffers


@contextmanager
def poisoned() -> Iterator[None]:
    """A block in which a buffer is filled with garbage, on the stream that receives, when it is handed out.

    If the allocator hands out memory that something still reads or writes, results are garbage, too.
    """
    plain = TensorSpec.empty

    def poison(described: TensorSpec, device: torch.device) -> Tensor:
        made = plain(described, device)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(1)

    TensorSpec.empty = poison  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorSpec.empty = plain  # type: ignore[method-assign]


def run_poisoned(rank: int, ranks: int) -> None:
    for name in ("zb-v", "1f1b"):
        plan = schedule.make(name, ranks=ranks, microbatches=3 * ranks)
        blocks, reference = model(plan.num_stages), model(plan.num_stages)
        held = {index: blocks[index] for index in plan.placement[rank]}
        pipe = Pipeline(held, schedule=plan, loss_fn=F.mse_loss)
        x, target = batch(3 * ranks)
        with poisoned():
            for _ in range(6):  # the host runs ahead: nothing waits for the GPU in between
                pipe.step(x, target=target, record=False)
                spoiled = [torch.full_like(x, float("nan")) for _ in range(8)]  # what the compute stream gets again
                del spoiled
        for _ in range(6):
            F.mse_loss(reference(x), target).backward()
        for index, module in held.items():
            assert_same_grads(module, reference[index], rtol=2e-3, atol=2e-4)
        pipe.close()


def test_results_do_not_change_when_buffers_are_poisoned() -> None:
    on_small_gpus(4, run_poisoned, 4)


# Checkpoints


def run_part(rank: int, ranks: int, steps: int, folder: str) -> None:
    """Train for some steps more, from a checkpoint if there is one; the last rank compares with one process."""
    pipe = Pipeline(model(8), schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    found = pipe.resume(folder, optimizer)
    first = 0 if found is None else found.step
    alone = model(8)
    other = torch.optim.AdamW(alone.parameters(), 1e-3)
    for step in range(first + steps):
        torch.manual_seed(step)
        x, target = batch(8)
        loss = F.mse_loss(alone(x), target)
        loss.backward()
        other.step()
        other.zero_grad()
        if step >= first:
            result = pipe.step(x, target=target, loss_everywhere=True)
            torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-3, atol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(alone.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-2, atol=5e-4)
    pipe.save(folder, optimizer, first + steps)
    pipe.close()


def test_saved_on_four_ranks_and_resumed_on_two(tmp_path: Path) -> None:
    on_small_gpus(4, run_part, 4, 3, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    on_small_gpus(2, run_part, 2, 3, str(tmp_path))
    assert (tmp_path / "step-00000006").is_dir()
