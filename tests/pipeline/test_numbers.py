"""Half precision, autocast, loss scaling, channels last, compiled stages and dropout on gloo: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import number_cases
from gloo import on_ranks, processes
from sternway.errors import PipelineError
from sternway.pipeline import GradScaler, LocalTransport, Pipeline


def run_all(rank: int) -> None:
    number_cases.half(rank, "cpu", torch.bfloat16)
    number_cases.half(rank, "cpu", torch.float16)
    number_cases.autocast(rank, "cpu")
    number_cases.scaler(rank, "cpu")
    number_cases.channels_last(rank, "cpu")


def test_every_kind_of_number() -> None:
    on_ranks(2, run_all, timeout=120)


@pytest.mark.parametrize("backend", ["sternway", "inductor"])
def test_compiled_stages(backend: str) -> None:
    on_ranks(2, number_cases.compiled, "cpu", backend, timeout=240)


def test_dropout_does_not_depend_on_schedule_or_ranks() -> None:
    """The same elements are left out by 1f1b on four ranks, by a V on two, and by all ranks in one process."""
    found = processes().SimpleQueue()
    cases = [(4, "1f1b"), (4, "zb-h1"), (2, "zb-v"), (2, "interleaved-1f1b")]
    for ranks, name in cases:
        on_ranks(ranks, number_cases.dropout, ranks, "cpu", name, found, timeout=120)
    grads: dict[int, list[Any]] = {}
    while not found.empty():
        _, _, stage, grad = found.get()
        grads.setdefault(stage, []).append(torch.tensor(grad))
    assert sorted(grads) == [0, 1, 2, 3]
    for same in grads.values():
        assert len(same) == len(cases)
        for other in same[1:]:
            torch.testing.assert_close(other, same[0])


def local(stages: dict[int, nn.Module], **options: Any) -> Pipeline:
    return Pipeline(
        stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport(), **options
    )


def test_a_step_leaves_the_random_numbers_alone_and_each_draws_others() -> None:
    torch.manual_seed(0)
    stages = {0: number_cases.Dropping(), 1: number_cases.Dropping()}
    pipe = local(stages)
    x, target = torch.randn(4, number_cases.DIM), torch.randn(4, number_cases.DIM)
    before = torch.get_rng_state()
    losses = [float(pipe.step(x, target=target).loss) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] != losses[1]
    torch.manual_seed(0)
    again = local(stages)
    torch.manual_seed(0)
    assert float(again.step(x, target=target).loss) == losses[0]


def test_a_scaler_without_a_pipeline() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(PipelineError, match="a GradScaler must belong to a pipeline"):
        GradScaler("cpu").step(optimizer)


def test_memory_limit_holds_for_a_named_schedule_too() -> None:
    stages = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    with pytest.raises(PipelineError, match=r"schedule 1f1b cannot keep to memory_limit=1; got activations of 2 micro"):
        local(stages, memory_limit=1.0)
    local(stages, memory_limit=2.0)


@pytest.mark.parametrize("rows", [2, 7])
def test_a_target_with_other_rows_than_the_batch(rows: int) -> None:
    pipe = local({0: nn.Linear(2, 2), 1: nn.Linear(2, 2)})
    with pytest.raises(PipelineError, match="the target must have as many rows as the batch"):
        pipe.step(torch.randn(4 if rows < 4 else 8, 2), target=torch.randn(rows, 2))


def run_reduce(rank: int) -> None:
    """Two copies of bfloat16 gradients that are averaged in float32: the mean of 1 and 2**-8, rounded once."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    pipe = Pipeline(
        {0: layer}, schedule="gpipe", n_microbatches=1, loss_fn=lambda y, goal: (y * goal).sum(), mesh=mesh,
        reduce_dtype=torch.float32,
    )  # fmt: skip
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    pipe.step(x, target=torch.full((1, 1), 1.0 if rank else 2.0**-7 * 1.5, dtype=torch.bfloat16))
    exact = torch.tensor((1.0 + 2.0**-7 * 1.5) / 2).to(torch.bfloat16)
    assert layer.weight.grad.dtype == torch.bfloat16
    assert layer.weight.grad.item() == exact.item()
    pipe.close()


def test_gradients_of_copies_are_averaged_in_float32() -> None:
    on_ranks(2, run_reduce, timeout=60)
