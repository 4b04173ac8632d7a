"""Real gloo processes of which one dies, is stopped or fails: every other one says so, and writes a report.

What counts as lost after how long is tested in ``test_signs.py`` with a clock of its own. Here a timeout is long enough
for a machine under load.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import heard_from, join_group
from sternway.errors import LostRankError
from sternway.pipeline import Pipeline

DIM, HEARTBEAT_TIMEOUT, LIMIT = 4, 6.0, 300.0  # LIMIT only ends a test that hangs


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
        elif self.way == "leave":
            atexit._run_exitfuncs()  # as after an exception that is not the pipeline's
            os._exit(1)
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
        for _ in range(3):  # a rank that has all it needs may end the second
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
        (2, 1, "leave", False),
        (2, 0, "cut", False),
        (2, 0, "SIGKILL", False),  # and with it the store
        (2, 0, "SIGSTOP", False),
    ],
)
def test_every_other_rank_says_which(ranks: int, victim: int, way: str, backward: bool, tmp_path: Path) -> None:
    heard = heard_from(ranks, _rank, way, backward, str(tmp_path), victim=victim, limit=LIMIT)
    others = [rank for rank in range(ranks) if rank != victim]
    assert set(others) <= heard.keys()
    for rank in others:
        kind, text, note = heard[rank]
        assert kind == LostRankError.__name__
        if victim == 0 and way.startswith("SIG"):
            assert "which global rank 0 h" in text  # held, or holds
        elif way == "cut":
            assert "its connection to another rank was lost, though all ranks are alive" in text
        else:
            assert f"rank {victim} was lost during step 1 (stage {victim}, at {victim}" in text
        if way == "raise":
            assert "ValueError: no luck" in text
        if way == "leave":
            assert "its process ended without closing the pipeline" in text
        report = json.loads(Path(note.split(": ", 1)[1]).read_text())
        assert report["rank"] == rank
        assert report["error"] == f"{kind}: {text}"
        assert report["here"]["step"] == 1
        assert [event["action"] for event in report["timeline"]][:1] == [f"{rank}F0"] or not report["timeline"]
        assert all(event["start"] <= event["end"] for event in report["timeline"])
        if victim or way == "raise":
            assert report["lost"]["rank"] == victim
            assert report["lost"]["position"]["stage"] == victim
            assert report["lost"]["position"]["step"] == 1
