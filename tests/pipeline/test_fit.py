"""Will it fit? What is predicted on tensors without memory, beside what real runs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from models import LlamaBlock, gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gloo import on_ranks
from sternway import pipeline, schedule
from sternway._torch.dtensors import local_part
from sternway._torch.memory import OperationCounter
from sternway.demo import GPT
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline import Pipeline
from sternway.pipeline.build._rank_bytes import RankBytes

DIM = 32
NAMES = "gpipe", "1f1b", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v"  # benchmarks/plan runs all


def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt(DIM, 8)


def sample() -> Tensor:
    return torch.randn(4, 16, DIM)


Predicted = dict[str, tuple[RankBytes, ...]]
"""By schedule, what each rank will hold."""


def predicted(n_microbatches: int, **options: Any) -> Predicted:
    """Once for all processes: it takes seconds."""
    x = sample()
    found = pipeline.fit(
        model(), x, ranks=2, n_microbatches=n_microbatches, loss_fn=F.mse_loss, target=x, **options
    )  # fmt: skip
    return {way.schedule.name: way.ranks for way in found.ways if not way.recompute}


def hold_what_was_predicted(rank: int, found: Predicted) -> None:
    for name in NAMES:
        pipe = Pipeline(model(), schedule=name, n_microbatches=6, loss_fn=F.mse_loss)
        batch = torch.randn(24, 16, DIM)
        pipe.step(batch, target=batch, record=False)
        with OperationCounter() as counter:
            pipe.step(batch, target=batch, record=False)  # now it knows what was there before
            before = counter.peak = counter.now
            pipe.step(batch, target=batch, record=False)
        pipe.close()
        each = found[name][rank]
        held = each.activations + each.working
        measured = counter.peak - before
        assert measured == pytest.approx(held, rel=0.03), (name, measured, each)
        assert measured <= 1.005 * held, (name, measured, each)  # less than predicted, but not more
        assert each.parameters == sum(p.nbytes for p in pipe.parameters())


def test_two_processes_hold_what_was_predicted() -> None:
    found = predicted(6)
    assert set(found) == set(schedule.names())
    on_ranks(2, hold_what_was_predicted, found)


SHARDED = {"1f1b": (None, ["4"]), "zb-v": (1, ["2", "4", "6"])}
"""By schedule, how many stages are gathered at once, and where the model is cut."""


def hold_what_was_predicted_of_shards(rank: int, found: Predicted) -> None:
    mesh, x = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard")), sample()
    batch = torch.randn(16, 16, DIM)

    def shard(stage: nn.Module) -> None:
        for block in stage.children():
            fully_shard(block, mesh=mesh["dp_shard"])

    for name, (gathered, cuts) in SHARDED.items():
        pipe = Pipeline(
            model(), schedule=name, n_microbatches=4, loss_fn=F.mse_loss, mesh=mesh, sample=x, shard=shard, cuts=cuts,
            gathered=gathered,
        )  # fmt: skip
        pipe.step(batch, target=batch, record=False)
        with ResizeCounter() as counter:
            pipe.step(batch, target=batch, record=False)
            before = counter.peak = counter.now
            pipe.step(batch, target=batch, record=False)
        each = found[name][mesh.get_local_rank("pp")]
        held = each.gathered + each.activations + each.working
        # FSDP frees what it reduces when that has arrived, which may be before the fullest moment or after it.
        assert 0.9 * held <= counter.peak - before <= 1.03 * held, (name, counter.peak - before, each)
        assert each.parameters == sum(local_part(p).nbytes for p in pipe.parameters())
        assert each.gathered > each.parameters
        pipe.close()
    _refuse_what_is_not_sharded(mesh, x, shard, max(each.total for each in found["1f1b"]))


def _refuse_what_is_not_sharded(mesh: DeviceMesh, x: Tensor, shard: Callable[[nn.Module], None], peak: int) -> None:
    """``memory=`` counts shards: just enough for these is enough, but not if a stage stays whole."""
    options: Any = {"schedule": "1f1b", "n_microbatches": 4, "loss_fn": F.mse_loss, "cuts": ["4"], "mesh": mesh}
    options |= {"sample": x, "sample_target": x, "memory": peak}
    Pipeline(model(), shard=shard, **options).close()
    with pytest.raises(PipelineError, match="shard must shard all parameters of a stage, if memory= is to count them"):
        Pipeline(model(), shard=lambda stage: None, **options)
    options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(PipelineError, match='memory counts what shard= shards over a dimension "dp_shard"'):
        Pipeline(model(), shard=shard, **options)


class ResizeCounter(OperationCounter):
    """Counts also what FSDP gathers into, whose memory it frees and takes again."""

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            self.now += size - storage.nbytes()
            self.peak = max(self.peak, self.now)
            return resize(storage, size)

        self._patch.setattr(torch.UntypedStorage, "resize_", counted)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
        super().__exit__(*error)


def test_four_processes_hold_what_was_predicted_of_shards() -> None:
    found: Predicted = {}
    for name, (gathered, _) in SHARDED.items():
        found |= predicted(4, schedule=name, shards=2, gathered=gathered)
    on_ranks(4, hold_what_was_predicted_of_shards, found)


def test_kinds_of_memory_add_up() -> None:
    found = pipeline.fit(model, sample(), ranks=2, n_microbatches=4, schedule="1f1b", memory="1GB")
    count = sum(p.numel() for p in model().parameters())
    assert found.parameters == count
    best = found.best
    assert best is not None
    assert sum(rank.parameters for rank in best.ranks) == 4 * count
    assert all(rank.gradients == rank.parameters and rank.optimizer == 2 * rank.parameters for rank in best.ranks)
    assert best.ranks[0].activations > best.ranks[1].activations  # the first rank of 1F1B holds more microbatches
    assert "It fits: 1f1b needs" in str(found)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_messages_between_gpus_take_less_than_between_cpus(name: str) -> None:
    def ways(made: nn.Module, **options: Any) -> tuple[pipeline.Way, ...]:
        return pipeline.fit(made, sample(), ranks=2, n_microbatches=4, schedule=name, **options).ways

    of_cpus, of_gpus = ways(model(), device="cpu"), ways(model(), device="cuda")
    assert ways(model()) == of_cpus  # where its weights are
    assert ways(model().to("meta")) == of_gpus  # it has none
    for cpu, gpu in zip(of_cpus, of_gpus, strict=True):
        assert cpu.schedule == gpu.schedule
        assert all(theirs.total <= ours.total for ours, theirs in zip(cpu.ranks, gpu.ranks, strict=True))
    assert sum(rank.total for way in of_gpus for rank in way.ranks) < sum(
        rank.total for way in of_cpus for rank in way.ranks
    )


def test_as_few_blocks_are_recomputed_as_make_it_fit() -> None:
    def count(**options: Any) -> pipeline.Fit:
        return pipeline.fit(model, sample(), ranks=2, n_microbatches=4, schedule="1f1b", **options)

    plain, cheap, most = count().ways
    assert [way.recompute for way in (plain, cheap, most)] == [False, True, True]
    assert (cheap.again, most.again) == ("blocks selectively", "blocks")
    assert most.peak < cheap.peak < plain.peak
    assert plain.time < cheap.time < most.time
    limit = (cheap.peak + most.peak) // 2
    found = count(memory=limit)
    (some,) = (way for way in found.ways if way.again not in ("", "blocks", "blocks selectively"))
    assert found.best is some
    assert some.peak <= limit
    assert plain.time < some.time < most.time
    assert some.again in str(found)
    assert 0 < sum(share.whole for share in some.schedule.shares.values()) < 2


def test_what_does_not_fit_says_what_is_lacking() -> None:
    found = pipeline.fit(model, sample(), ranks=2, n_microbatches=4, memory=1000)
    assert found.best is None
    assert "It does not fit: the smallest way" in found.verdict
    assert "too large" in str(found)


def test_what_offload_would_change_is_said() -> None:
    def count(memory: int | None) -> pipeline.Fit:
        x = sample()
        return pipeline.fit(
            model(), x, ranks=2, n_microbatches=6, schedule="1f1b", loss_fn=F.mse_loss, target=x, memory=memory
        )

    plain, *others = count(None).ways
    assert not any(way.moved for way in (plain, *others))
    found = count(int(0.8 * plain.peak))
    assert found.best is not None
    assert (found.best.recompute, found.best.moved) == (True, 0)
    (moved,) = (way for way in found.ways if way.moved and not way.recompute)
    assert found.fits(moved)
    assert moved.time == plain.time  # of a link that keeps up
    assert "With offload, 1f1b-offloaded, moving " in found.verdict
    assert "if the link keeps up" in found.verdict


def test_a_large_model_takes_no_memory() -> None:
    """Over a billion parameters, in half precision."""

    def build() -> tuple[nn.Module, Tensor]:
        layers = [LlamaBlock(4096, 32, 8) for _ in range(4)]
        return nn.Sequential(nn.Embedding(128_000, 4096), *layers).to(torch.bfloat16), torch.zeros(1, 2048).long()

    found = pipeline.fit(build, ranks=4, n_microbatches=8, schedule="zb-h1", memory="80GB")
    assert found.parameters > 1e9
    assert found.best is not None
    assert all(rank.total > 2**30 for rank in found.best.ranks)


def test_a_whole_gpt_with_its_own_forward() -> None:
    def build() -> tuple[nn.Module, Tensor]:
        return GPT(vocabulary=97, dim=64, heads=4, layers=4, length=32), torch.zeros(2, 32).long()

    found = pipeline.fit(build, ranks=2, n_microbatches=4)
    assert {way.schedule.name for way in found.ways} >= {"1f1b", "zb-h1", "zb-v"}
    assert [way.time for way in found.ways] == sorted(way.time for way in found.ways)
    assert all(way.time >= 1 for way in found.ways)


def test_errors() -> None:
    with pytest.raises(PipelineError, match="the function must return a model and a sample; got Sequential, and no"):
        pipeline.fit(model, ranks=2, n_microbatches=4)
    with pytest.raises(PipelineError, match="optimizer must be one that is known; got 'adamax'"):
        pipeline.fit(model, sample(), ranks=2, n_microbatches=4, optimizer="adamax")
    with pytest.raises(PipelineError, match="memory must be a size; got 'lots'"):
        pipeline.fit(model, sample(), ranks=2, n_microbatches=4, memory="lots")
    with pytest.raises(PipelineError, match="shards must be a number from 1 on; got int 0"):
        pipeline.fit(model, sample(), ranks=2, n_microbatches=4, shards=0)
    with pytest.raises(PipelineError, match="device must be known"):
        pipeline.fit(model, sample(), ranks=2, n_microbatches=4, device="tpu")
    with pytest.raises(ScheduleError, match="nope"):
        pipeline.fit(model, sample(), ranks=2, n_microbatches=4, schedule="nope")
    with pytest.raises(PipelineError, match=r"the sample .* must go through the model"):
        pipeline.fit(model, torch.zeros(3, 3), ranks=2, n_microbatches=4)
    with pytest.raises(PipelineError, match="some output of the model must require a gradient; got 1 tensors"):
        pipeline.fit(model().requires_grad_(False), sample(), ranks=2, n_microbatches=4)
    with pytest.raises(PipelineError, match="at least 64 pieces that can be cut apart; got 8"):
        pipeline.fit(model, sample(), ranks=64, n_microbatches=64, schedule="1f1b")
