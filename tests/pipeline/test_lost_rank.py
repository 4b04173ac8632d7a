"""Real gloo processes of which one dies, is stopped or fails: every other one says so, in time, and in a file."""

from __future__ import annotations

import json
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

from gloo import free_port, join_group, processes
from sternway.errors import LostRankError
from sternway.pipeline import Pipeline

DIM, HEARTBEAT_TIMEOUT, LIMIT = 4, 2.0, 60.0


class Fatal(nn.Module):
    """Ends its process in some way in the third microbatch of the second step, forward or backward."""

    def __init__(self, way: str, backward: bool, transport: list[Any]) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(DIM, DIM), 0
        self.way, self.backward, self.transport = way, backward, transport

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        if self.calls == 7:
            if not self.backward:
                self.end()
            else:
                y.register_hook(lambda grad: self.end())
        return y

    def end(self) -> None:
        if self.way in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, self.way))
        elif self.way == "raise":
            raise ValueError("no luck")
        elif self.way == "exit":
            os._exit(0)
        elif self.way == "cut":
            self.transport[0]._groups.wake()


def _rank(rank: int, ranks: int, port: int, victim: int, way: str, backward: bool, reports: str, said: Any) -> None:
    join_group(rank, ranks, port)
    transport: list[Any] = []
    stage = Fatal(way, backward, transport) if rank == victim else nn.Linear(DIM, DIM)
    pipe = Pipeline(
        {rank: stage},
        schedule="1f1b",
        n_microbatches=4,
        loss_fn=F.mse_loss,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        reports=reports,
    )
    transport.append(pipe.transport)
    torch.manual_seed(0)
    try:
        for _ in range(2):
            pipe.step(torch.randn(8, DIM), target=torch.randn(8, DIM))
    except Exception as error:
        said.put((rank, type(error).__name__, str(error), "".join(error.__notes__)))
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "victim", "way", "backward"),
    [
        (2, 1, "SIGKILL", False),
        (3, 2, "SIGKILL", True),
        (3, 1, "SIGSTOP", True),
        (2, 1, "raise", True),
        (2, 1, "exit", False),
        (2, 0, "cut", False),
        (2, 0, "SIGKILL", False),  # and with it the store
        (2, 0, "SIGSTOP", False),
    ],
)
def test_every_other_rank_says_which(ranks: int, victim: int, way: str, backward: bool, tmp_path: Path) -> None:
    context = processes()
    said = context.SimpleQueue()
    port = free_port()
    started = [
        context.Process(target=_rank, args=(rank, ranks, port, victim, way, backward, str(tmp_path), said))
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
    others = [rank for rank in range(ranks) if rank != victim]
    assert set(others) <= heard.keys()
    for rank in others:
        kind, text, note = heard[rank]
        assert kind == LostRankError.__name__
        if victim == 0 and way.startswith("SIG"):
            assert "rank 0 of all" in text
        elif way == "cut":
            assert "it lost a connection" in text or "rank 0" in text
        else:
            assert f"rank {victim} (stage {victim}, at {victim}" in text
        if way == "raise":
            assert "ValueError: no luck" in text
        report = json.loads(Path(note.split(": ", 1)[1]).read_text())
        assert report["rank"] == rank
        assert report["error"] == f"{kind}: {text}"
        assert report["here"]["step"] == 1
        assert [event["action"] for event in report["timeline"]][:1] == [f"{rank}F0"] or not report["timeline"]
        assert all(event["start"] <= event["end"] for event in report["timeline"])
        if victim or way == "raise":
            assert report["lost"]["rank"] == victim
            assert report["lost"]["spot"]["stage"] == victim
            assert report["lost"]["spot"]["step"] == 1


def _leaves(rank: int, port: int, said: Any) -> None:
    join_group(rank, 2, port)
    pipe = Pipeline(
        {rank: nn.Linear(DIM, DIM)},
        schedule="1f1b",
        n_microbatches=2,
        loss_fn=F.mse_loss,
        heartbeat_timeout=HEARTBEAT_TIMEOUT / 2,
    )
    pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    if rank == 1:
        pipe.close()
    else:
        time.sleep(2 * HEARTBEAT_TIMEOUT)  # far longer than the other may be silent
        said.put(pipe.transport.watch.loss)
        pipe.close()


def test_a_rank_that_closes_its_pipeline_is_not_missed() -> None:
    context = processes()
    said = context.SimpleQueue()
    port = free_port()
    started = [context.Process(target=_leaves, args=(rank, port, said)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT)
        assert process.exitcode == 0
    assert said.get() is None
