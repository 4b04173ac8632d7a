"""A pipeline that is dropped without ``close()``: its threads end, and nobody waits for them."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from gloo import on_ranks
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
