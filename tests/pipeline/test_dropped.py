"""A pipeline that is dropped without ``close()``: its threads end, and nobody waits for them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway.errors import LostRankError
from sternway.pipeline import Pipeline
from sternway.pipeline.faults._signs import DROPPED

DIM = 4


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sternway-")]


def drop_some(rank: int) -> None:
    before = threads()
    x = torch.randn(8, DIM)
    for _ in range(2):  # the next one can be built and used
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
        pipe = Pipeline(model, schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss, heartbeat_timeout=6)
        result = pipe.step(x, target=x)
        mine = [thread for thread in threads() if thread not in before]
        assert {thread.name for thread in mine} == {"sternway-beat", "sternway-guard", "sternway-gather"}
        held, watch = [weakref.ref(pipe), weakref.ref(pipe.transport)], pipe.transport.watch
        del pipe, model
        gc.unfreeze()
        gc.collect()
        assert [each() for each in held] == [None, None]
        assert result.timeline.makespan > 0  # what was handed in is gathered
        for thread in mine:
            thread.join(60)
            assert not thread.is_alive(), thread.name
        assert watch.lost is None
        assert DROPPED in watch._signs._store.get(f"beat/{rank}").decode()


def test_threads_of_a_dropped_pipeline_end() -> None:
    on_ranks(2, drop_some)


def go_on_alone(rank: int) -> None:
    x, model = torch.randn(8, DIM), nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    pipe = Pipeline(model, schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss, heartbeat_timeout=6)
    pipe.step(x, target=x)
    if rank == 1:  # its process goes on, and keeps its connections
        del pipe, model
        gc.unfreeze()
        gc.collect()
        return
    with pytest.raises(LostRankError, match=f"rank 1 was lost after step 0; got {DROPPED}"):
        pipe.step(x, target=x)


def test_a_rank_that_waits_for_one_that_has_dropped_its_pipeline() -> None:
    on_ranks(2, go_on_alone, timeout=120)
