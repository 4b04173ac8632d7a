"""Real gloo processes: gradients equal one process's, shapes may change, and a mistake is an error on every rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway import pipeline, schedule
from sternway.demo import GPT
from sternway.errors import PipelineError
from sternway.pipeline import Pipeline

DIM = 8


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(DIM, 1, heads=2) for _ in range(count)]


def _batch(rows: int, length: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, DIM), torch.randn(rows, length, DIM)


def _every_schedule(rank: int, ranks: int, microbatches: int, names: list[str]) -> None:
    for name in names:
        plan = schedule.make(name, ranks=ranks, microbatches=microbatches)
        mine, reference = _stages(plan.num_stages), nn.Sequential(*_stages(plan.num_stages))
        held = {index: mine[index] for index in plan.placement[rank]}
        pipe = Pipeline(held, schedule=plan, loss_fn=F.mse_loss)
        torch.manual_seed(1)
        for length in (4, 4, 6, 4):  # the same shapes again, others, and back
            x, target = _batch(2 * microbatches, length)
            result = pipe.step(x, target=target, loss_everywhere=True)
            loss = F.mse_loss(reference(x), target)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach(), msg=lambda text, name=name: f"{name}: {text}")
            for index, module in held.items():
                assert_same_grads(module, reference[index], rtol=1e-3, atol=1e-5)
        timeline = result.timeline
        assert [[event.action for event in r] for r in timeline.events] == [list(r) for r in plan.actions]
        for events in timeline.events:
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(events))
        pipe.close()


def test_every_schedule_on_two_ranks() -> None:
    on_ranks(2, _every_schedule, 2, 4, schedule.names())


def test_four_ranks() -> None:
    on_ranks(4, _every_schedule, 4, 8, ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])


class Variable(nn.Module):
    """Sends on a tensor whose length depends on the data, an object, and a number that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        keep = int(x[0, 0] > 0) + 1
        return {"x": self.layer(x)[:keep], "slice": slice(0, keep), "calls": self.calls, "whole": x}


class UsesVariable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, parcel: dict[str, Any]) -> Tensor:
        return self.layer(parcel["x"]).mean(0, keepdim=True) + parcel["whole"][parcel["slice"]].sum() + parcel["calls"]


def _dynamic(rank: int) -> None:
    torch.manual_seed(0)
    stages, reference = (nn.ModuleList([Variable(), UsesVariable()]) for _ in range(2))
    reference.load_state_dict(stages.state_dict())
    pipe = Pipeline({rank: stages[rank]}, schedule="zb-h1", n_microbatches=3, loss_fn=F.mse_loss, dynamic=True)
    torch.manual_seed(1)
    for _ in range(3):
        x, target = torch.randn(9, DIM), torch.randn(3, DIM)
        pipe.step(x, target=target)
        for part, goal in zip(x.chunk(3), target.chunk(3), strict=True):
            (F.mse_loss(reference[1](reference[0](part)), goal) / 3).backward()
        assert_same_grads(stages[rank], reference[rank], rtol=1e-4, atol=1e-5)


def test_shapes_and_values_that_depend_on_the_data() -> None:
    on_ranks(2, _dynamic)


def _whole_model(rank: int) -> None:
    torch.manual_seed(0)
    model, reference = (GPT(vocabulary=11, dim=DIM, heads=2, layers=4, length=6) for _ in range(2))
    model.head.weight = model.tokens.weight
    reference.head.weight = reference.tokens.weight
    reference.load_state_dict(model.state_dict())

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    tokens = torch.randint(0, 11, (8, 6))
    pipe = Pipeline(model, schedule="auto", n_microbatches=4, loss_fn=loss, sample=tokens[:2], sample_target=tokens[:2])
    assert pipe.costs.comm > 0  # a message takes its time
    mine = torch.optim.AdamW(pipe.parameters(), 1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), 1e-3)
    for _ in range(5):
        result = pipe.step(tokens, target=tokens, loss_everywhere=True)
        norm = pipe.clip_grad_norm_(0.5)
        expected = loss(reference(tokens), tokens)
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), rtol=1e-4, atol=1e-5)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-3, atol=1e-4)


def test_a_tied_model_cut_searched_clipped_and_optimized() -> None:
    on_ranks(2, _whole_model)


def _samples(rank: int) -> None:
    def build(sample: Tensor | None) -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
        return Pipeline(model, schedule="auto", n_microbatches=2, loss_fn=F.mse_loss, sample=sample)

    for broken in (torch.randn(2, DIM + 1), torch.randn(2, DIM + 1) if rank == 0 else torch.randn(2, DIM)):
        with pytest.raises(
            PipelineError, match=r"the sample .* must go through the model, forward and backward; got RuntimeError"
        ):
            build(broken)
    pipe = build(torch.randn(2, DIM) if rank == 0 else None)  # the first rank's is enough
    assert pipe.costs.comm > 0
    x = torch.randn(4, DIM)
    assert pipe.step(x, target=x, loss_everywhere=True).loss is not None


def test_a_sample_is_measured_for_all_ranks_or_fails_on_all() -> None:
    on_ranks(2, _samples)


def _data_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    copy, place = rank // 2, rank % 2
    mine, reference = _stages(2), nn.Sequential(*_stages(2))
    pipe = Pipeline({place: mine[place]}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh)
    torch.manual_seed(1)
    for _ in range(2):
        x, target = _batch(8)
        pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
        F.mse_loss(reference(x), target).backward()
        assert_same_grads(mine[place], reference[place], rtol=1e-4, atol=1e-6)
        for module in (mine[place], reference):
            module.zero_grad()


def test_two_copies_of_two_ranks() -> None:
    on_ranks(4, _data_parallel)


def _ties_then_copies(rank: int) -> None:
    """Ranks 0 and 3 have summed something by themselves. Groups that are made later must still find each other."""
    model = GPT(vocabulary=11, dim=DIM, heads=2, layers=4, length=6)
    model.head.weight = model.tokens.weight
    tokens = torch.randint(0, 11, (8, 6))
    pipe = Pipeline(
        model, schedule="1f1b", n_microbatches=4, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    pipe.step(tokens, target=tokens)
    pipe.close()
    _data_parallel(rank)


def test_copies_after_ties() -> None:
    on_ranks(4, _ties_then_copies)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(DIM, DIM), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("no luck")
        return self.layer(x)


def _breaks(rank: int, ranks: int, broken: int) -> None:
    stage = Breaks() if rank == broken else nn.Linear(DIM, DIM)
    pipe = Pipeline({rank: stage}, schedule="1f1b", n_microbatches=4, loss_fn=F.mse_loss)
    with pytest.raises(PipelineError, match=rf"{broken}F2 failed \(rank {broken}, stage {broken}.*ValueError: no luck"):
        pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    with pytest.raises(PipelineError, match="is closed"):
        pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    dist.barrier()  # the default group is unharmed


@pytest.mark.parametrize(("ranks", "broken"), [(2, 0), (2, 1), (4, 2)])
def test_an_error_in_one_stage_is_an_error_on_every_rank(ranks: int, broken: int) -> None:
    on_ranks(ranks, _breaks, ranks, broken)


def _misfits(rank: int) -> None:
    def build(stages: nn.Module | dict[int, nn.Module], **options: Any) -> Pipeline:
        return Pipeline(stages, **{"schedule": "1f1b", "n_microbatches": 2, "loss_fn": F.mse_loss} | options)

    layer = nn.Linear(DIM, DIM)
    with pytest.raises(PipelineError, match=r"the same plan; got schedule='1f1b' on rank 1, and 'gpipe' on rank 0"):
        build({rank: layer}, schedule="1f1b" if rank else "gpipe")
    with pytest.raises(PipelineError, match="all ranks must run the same schedule; got another on rank 1"):
        build({rank: layer}, schedule=schedule.make("1f1b" if rank else "gpipe", ranks=2, microbatches=2))
    with pytest.raises(PipelineError, match=r"the same plan; got stages='one by one' on rank 1, and 'a whole model'"):
        build({1: layer} if rank else nn.Sequential(layer, nn.Linear(DIM, DIM)))
    with pytest.raises(PipelineError, match="the same plan; got n_microbatches=4 on rank 1, and 2 on rank 0"):
        build(nn.Sequential(layer, nn.Linear(DIM, DIM)), schedule="auto", n_microbatches=4 if rank else 2)
    with pytest.raises(PipelineError, match=r"rank 1 must hold the stages \[1\].* got no stage 1, but \[0\]"):
        build({0: layer})
    with pytest.raises(PipelineError, match=r"here; got stage 1 too"):
        build({0: layer, 1: layer} if rank == 0 else {1: layer})
    pipe = build({rank: layer})
    with pytest.raises(PipelineError, match=r"the batch cannot be cut .* got a tensor of shape \(1, 8\)"):
        pipe.step(torch.ones(1, DIM), target=torch.ones(2, DIM))
    pipe.step(torch.ones(2, DIM), target=torch.ones(2, DIM))  # nothing was spoiled


def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    on_ranks(2, _misfits)


def _searches(rank: int) -> None:
    x = torch.randn(2, DIM)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    with mock.patch.object(schedule, "search", wraps=schedule.search) as search:
        pipe = Pipeline(model, schedule="auto", n_microbatches=4, loss_fn=F.mse_loss, sample=x, sample_target=x)
    assert bool(search.call_count) == (rank == 0)
    pipe.step(torch.randn(8, DIM), target=torch.randn(8, DIM))
    pipe.close()


def test_the_first_rank_searches_for_all() -> None:
    on_ranks(2, _searches)


class Shrinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(DIM, DIM), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)[: 1 if self.calls > 4 else None]


def _shrinks(rank: int) -> None:
    pipe = Pipeline(
        {rank: nn.Linear(DIM, DIM) if rank else Shrinks()},
        schedule="1f1b",
        n_microbatches=2,
        loss_fn=lambda y, t: y.mean(),
    )
    for _ in range(2):
        pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    with pytest.raises(PipelineError, match=r"stage 0's output .* got \(1, 8\), not \(2, 8\). Fix: pass dynamic=True"):
        pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))


def test_an_output_that_changes_shape_unannounced() -> None:
    on_ranks(2, _shrinks)


def test_without_a_process_group() -> None:
    with pytest.raises(
        PipelineError, match=r"needs torch\.distributed; got no process group. Fix: start with torchrun"
    ):
        pipeline.DistTransport()
