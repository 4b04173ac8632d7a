"""A stage fails on one rank while its peer waits in a collective of its own group: the peer is woken, too.

The process that fails stays alive until all others have ended, so that no connection is closed by its end.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from gloo import heard_from, join_group, on_ranks
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import Pipeline
from sternway.pipeline.faults import _sockets

DIM, RANKS, HEARTBEAT_TIMEOUT, LIMIT = 4, 4, 6.0, 300.0  # LIMIT only ends a test that hangs


class Faulty(nn.Module):
    """A tensor-parallel stage that raises in F, I or W of the third microbatch of the second step."""

    def __init__(self, where: str | None) -> None:
        super().__init__()
        self.up, self.down, self.where, self.calls = nn.Linear(DIM, 8), nn.Linear(8, DIM), where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        fails = self.where is not None and self.calls == 7
        if fails and self.where == "F":
            raise ValueError("no luck")
        y: Tensor = self.down(F.gelu(self.up(x)))
        if fails and self.where == "I":
            y.register_hook(_raise)  # before the collective of the input's gradient
        elif fails:
            self.up.weight.register_hook(_raise)
        return y


def _raise(grad: Tensor) -> Tensor:
    raise ValueError("no luck")


def _rank(rank: int, ranks: int, port: int, victim: int, where: str, shard: bool, reports: str, said: Any) -> None:
    join_group(rank, ranks, port)
    other = "dp_shard" if shard else "tp"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", other))
    stage: nn.Module = Faulty(where if rank == victim else None)
    if shard:
        fully_shard(stage, mesh=mesh[other])
    else:
        parallelize_module(stage, mesh[other], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = Pipeline(
        {mesh.get_local_rank("pp"): stage}, schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss, mesh=mesh,
        heartbeat_timeout=HEARTBEAT_TIMEOUT, reports=reports,
    )  # fmt: skip
    torch.manual_seed(0)
    try:
        for _ in range(4):  # a rank that has all it needs may end the second
            pipe.step(torch.ones(8, DIM), target=torch.ones(8, DIM))
    except Exception as error:
        said.put((rank, type(error).__name__, str(error)))
    if rank == victim:
        time.sleep(LIMIT)
    os._exit(0)


@pytest.mark.parametrize(
    ("victim", "where", "shard"),
    [(0, "F", False), (3, "I", False), (1, "W", False), (2, "F", True)],
)
def test_a_peer_in_a_collective_of_its_own_is_woken(victim: int, where: str, shard: bool, tmp_path: Any) -> None:
    heard = heard_from(RANKS, _rank, where, shard, str(tmp_path), victim=victim, limit=LIMIT)
    assert sorted(heard) == list(range(RANKS))
    stage = victim // 2
    assert heard[victim][0] == "PipelineError"
    assert f"{stage}{where}" in heard[victim][1]
    assert "ValueError: no luck" in heard[victim][1]
    for rank in set(heard) - {victim}:
        assert heard[rank][0] == "LostRankError", heard[rank]
        assert f"rank {victim} was lost during step 1 (stage {stage}, at {stage}{where}" in heard[rank][1]
        assert "ValueError: no luck" in heard[rank][1]


def test_connections_are_found_by_their_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        before = _sockets.opened()
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        spared = socket.create_connection(store.getsockname())
        answers, _ = store.accept()
        made = _sockets.opened() - before
        port = store.getsockname()[1]
        addresses = [f"127.0.0.1 {each.getsockname()[1]}" for each in (ours, theirs)]
        assert sorted(_sockets.ends(made, port)) == sorted(addresses)
        other = f"127.0.0.1 {theirs.getsockname()[1]}"
        found = _sockets.leading_to({other, "127.0.0.1 1"}, made)
        assert [descriptor for descriptor, _ in found] == [ours.fileno()]
        _sockets.cut(found, port)
        assert theirs.recv(1) == b"", "it is closed"
        spared.sendall(b"x")
        assert answers.recv(1) == b"x"
        for each in (ours, theirs, spared, answers):
            each.close()


class Impatient(nn.Linear):
    """Raises what gloo raises if a collective of a group of the user's takes too long."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation")
        return super().forward(x)


def _times_out(rank: int) -> None:
    stage, x = Impatient(DIM, DIM), torch.randn(4, DIM)
    pipe = Pipeline({rank: stage}, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, heartbeat_timeout=2.0)
    pipe.step(x, target=x)
    stage.fails = rank == 1
    with pytest.raises(PipelineError, match="Timed out waiting 1000ms") as raised:
        pipe.step(x, target=x)
    assert isinstance(raised.value, LostRankError) == (rank == 0)


def test_an_error_of_gloo_with_all_ranks_alive_keeps_its_text() -> None:
    on_ranks(2, _times_out)
