"""Real NCCL between small GPUs of which one dies, is stopped, raises or fails: every other rank says so in time.

The processes that are left build a new pipeline each time (``workers.py``). The random kills are the same in every run.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
import torch

from small_gpus import Init
from sternway.errors import LostRankError, PipelineError
from workers import STEPS, Ending, Told, Workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEARTBEAT_TIMEOUT, SPARE, LIMIT = 4.0, 5.0, 60.0  # LIMIT only ends a test that hangs


def check(told: dict[int, Told], ending: Ending) -> None:
    """What every rank but the one that ended must tell."""
    for rank, each in told.items():
        if rank == ending.rank:
            continue
        assert each.error == LostRankError.__name__, f"rank {rank} after {ending}: {each.error} {each.text}"
        if ending.rank == 0 and ending.way.startswith("SIG"):
            assert "which global rank 0 h" in each.text  # held, or holds: the store
        else:
            lost, during = f"rank {ending.rank} was lost", f" during step {ending.step}"
            silent = (f"{lost}{during}", f"{lost}; its last sign of life was")  # who waits on the host knows more
            said = {"raise": (f"{lost}{during}",), "gpu": (lost,)}.get(ending.way, silent)
            assert any(each.text.startswith(words) for words in said), each.text
            assert {"raise": "no luck", "gpu": "CUDA error: device-side assert"}.get(ending.way, "") in each.text
        assert each.late < HEARTBEAT_TIMEOUT + SPARE
        assert each.steps in (ending.step, ending.step + 1)  # a rank may be through when another ends in its backward
        assert each.watchdogs == 0


def live(workers: Workers, ending: Ending, folder: Path) -> dict[int, Told]:
    start = time.perf_counter()
    told = workers.live(ending, HEARTBEAT_TIMEOUT, folder, LIMIT)
    late = max((each.late for rank, each in told.items() if rank != ending.rank), default=0.0)
    sys.stderr.write(f"{ending}: known after {late:.1f} s; the life took {time.perf_counter() - start:.1f} s\n")
    return told


@pytest.mark.parametrize(("ranks", "init"), [(2, "lazy"), (4, "eager")])
def test_every_other_rank_says_which_and_goes_on(ranks: int, init: Init, tmp_path: Path) -> None:
    last = ranks - 1
    endings = [
        Ending("SIGKILL", last),
        Ending("raise", 1, backward=True),
        Ending("SIGSTOP", last, backward=True),
        Ending("gpu", 1),
    ]
    allocated = []
    with Workers(ranks, "cuda", init) as workers:
        for ending in endings:
            told = live(workers, ending, tmp_path)
            check(told, ending)
            allocated.append(told[0].allocated)
            if ending.way == "raise":
                assert told[ending.rank].error == PipelineError.__name__, told[ending.rank]
        for rank, each in live(workers, Ending("none"), tmp_path).items():
            assert (each.error, each.steps) == ("none", STEPS), f"rank {rank}: {each.text}"
            if rank == 0:  # never started again
                allocated.append(each.allocated)
    assert max(allocated[1:]) <= allocated[0], allocated


def test_twenty_random_kills(tmp_path: Path) -> None:
    draw = random.Random(0)
    with Workers(4, "cuda", "lazy") as workers:
        for _ in range(20):
            ending = Ending("SIGKILL", draw.randrange(4), draw.randrange(4), draw.random() < 0.5)
            check(live(workers, ending, tmp_path), ending)
        for rank, each in live(workers, Ending("none"), tmp_path).items():
            assert (each.error, each.steps) == ("none", STEPS), f"rank {rank}: {each.text}"
