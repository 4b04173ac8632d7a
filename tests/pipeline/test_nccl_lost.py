"""Real NCCL between small GPUs of which one dies, is stopped or fails: every other one says so in time."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import free_port, processes
from small_gpus import become_small_gpu
from sternway.errors import LostRankError
from sternway.pipeline import Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DIM, HEARTBEAT_TIMEOUT, SPARE, LIMIT = 32, 6.0, 5.0, 90.0  # LIMIT only ends a test that hangs


class Fatal(nn.Module):
    """Ends its process in some way in the second microbatch of the third step."""

    def __init__(self, way: str, when: Any) -> None:
        super().__init__()
        self.layer, self.calls, self.way, self.when = nn.Linear(DIM, DIM), 0, way, when

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 10:
            self.when.value = time.time()
            if self.way == "raise":
                raise ValueError("no luck")
            os.kill(os.getpid(), getattr(signal, self.way))
        return self.layer(x)


def _rank(rank: int, ranks: int, port: int, victim: int, way: str, reports: str, when: Any, said: Any) -> None:
    become_small_gpu(rank, ranks, port, "eager", {}, LIMIT)  # no MPS, which does not survive a client's death
    stage = (Fatal(way, when) if rank == victim else nn.Linear(DIM, DIM)).cuda()
    pipe = Pipeline(
        {rank: stage},
        schedule="1f1b",
        n_microbatches=4,
        loss_fn=F.mse_loss,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        reports=reports,
    )
    x = torch.randn(8, DIM, device="cuda")
    error: Exception | None = None
    try:
        for _ in range(5):
            pipe.step(x, target=x, record=False)
            torch.cuda.synchronize()
    except Exception as raised:
        error = raised
    late = time.time() - when.value
    torch.cuda.synchronize()  # nothing is left on the GPU that waits for the lost rank
    said.put((rank, type(error).__name__, str(error), late))
    sys.stderr.write(f"[rank {rank}] after {late:.1f} s: {type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "victim", "way"), [(2, 1, "raise"), (2, 1, "SIGKILL"), (3, 1, "SIGKILL"), (3, 2, "SIGSTOP")]
)
def test_every_other_rank_says_which(ranks: int, victim: int, way: str, tmp_path: Path) -> None:
    context = processes()
    said, when, port = context.SimpleQueue(), context.Value("d", 0.0), free_port()
    started = [
        context.Process(target=_rank, args=(rank, ranks, port, victim, way, str(tmp_path), when, said))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        for rank, process in enumerate(started):
            if rank != victim:
                process.join(LIMIT)
                assert not process.is_alive(), f"rank {rank} hangs"
    finally:
        for process in started:
            process.kill()
            process.join()
    heard = {}
    while not said.empty():
        rank, *words = said.get()
        heard[rank] = words
    for rank in set(range(ranks)) - {victim}:
        assert rank in heard, f"rank {rank} ended without a word"
        kind, text, late = heard[rank]
        assert kind == LostRankError.__name__, text
        assert f"rank {victim} was lost during step 2" in text
        assert late < HEARTBEAT_TIMEOUT + SPARE
