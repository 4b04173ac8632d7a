"""A loss that is one number must be the mean over rows; others are refused in the first step, not averaged wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline, Presplit
from sternway.pipeline.step._loss import WeighedLoss
from sternway.pipeline.transport import _later

DIM = 4
WEIGHT = torch.linspace(0.1, 2.0, DIM)


def pipe_of(
    loss_fn: Callable[[Any, Any], Any], n_microbatches: int = 2, dtype: torch.dtype = torch.float32
) -> Pipeline:
    torch.manual_seed(0)
    stages = {i: nn.Linear(DIM, DIM, dtype=dtype) for i in range(2)}
    transport = LocalTransport()
    return Pipeline(
        stages, schedule="1f1b", n_microbatches=n_microbatches, ranks=2, loss_fn=loss_fn, transport=transport
    )  # fmt: skip


def masked(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    goal, mask = target
    return ((output - goal).square() * mask).sum() / mask.sum()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ target.t(), torch.arange(len(output)))


LABELS = torch.tensor([0, 3, 1, 2, 3, 3, 0, 1])
GOAL = torch.linspace(-1, 1, 8 * DIM).view(8, DIM)
MASK = (torch.arange(8 * DIM).view(8, DIM) % 7 > 2).float()
X = torch.cos(torch.arange(8.0 * DIM)).view(8, DIM)


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), LABELS),
        (nn.CrossEntropyLoss(reduction="sum"), LABELS),
        (nn.MSELoss(reduction="sum"), GOAL),
        (masked, (GOAL, MASK)),
        (contrastive, GOAL),
    ],
)
def test_other_losses_are_refused(loss_fn: Any, target: Any) -> None:
    pipe = pipe_of(loss_fn)
    with pytest.raises(PipelineError, match=r"must return the mean over the rows.*got .* for two rows.*\(sum, count\)"):
        pipe.step(X, target=target)
    assert pipe_of(loss_fn, 1).step(X, target=target).loss is not None  # one microbatch is the batch


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target + torch.randn_like(target))


def regular(output: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(output, target) + 0.1 * WEIGHT.square().sum()


def within_microbatches(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return contrastive(output, target) * len(output), len(output)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), noisy, regular, within_microbatches])
def test_means_are_not(loss_fn: Any) -> None:
    assert pipe_of(loss_fn).step(X, target=GOAL).loss is not None


class Numbers(nn.Module):
    """Returns, beside rows, a number that it makes of them and one that it does not."""

    def __init__(self, is_flat: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Parameter(torch.ones(()))
        if is_flat:
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.last(self.first(x).tanh())
        return {"y": y, "balance": y.square().mean(0).max(), "loss": (y - 1).square().mean(), "scale": self.scale.exp()}


def number_pipe(loss_fn: Any, is_flat: bool = False) -> Pipeline:
    options: dict[str, Any] = {"schedule": "gpipe", "n_microbatches": 4, "transport": LocalTransport(), "ranks": 2}
    return Pipeline(Numbers(is_flat), loss_fn=loss_fn, **options)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output, target: output["loss"],
        lambda output, target: F.mse_loss(output["y"], target) + 0.1 * output["balance"],
    ],
)
def test_a_number_that_the_model_makes_of_rows_is_refused(loss_fn: Any, is_flat: bool) -> None:
    pipe = number_pipe(loss_fn, is_flat)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    if is_flat:  # a head of zeros gives the same number for all rows, until it is trained
        pipe.step(X, target=GOAL)
        optimizer.step()
    with pytest.raises(PipelineError, match=r"uses a number that the model computes.*\(loss \* rows, rows\)"):
        pipe.step(X, target=GOAL)


def test_one_that_it_does_not_make_of_rows_is_not() -> None:
    scaled, pair = (
        number_pipe(lambda output, target: F.mse_loss(output["y"] * output["scale"], target)),
        number_pipe(lambda output, target: (output["loss"] * len(target), len(target))),
    )
    for pipe in (scaled, pair):
        assert pipe.step(X, target=GOAL).loss is not None


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [(nn.CrossEntropyLoss(weight=WEIGHT), LABELS), (nn.MSELoss(reduction="sum"), GOAL), (contrastive, GOAL)],
)
def test_microbatches_of_one_row_are_compared_with_each_other(loss_fn: Any, target: Any) -> None:
    with pytest.raises(PipelineError, match=r"must return the mean over the rows.*got .* for two rows"):
        pipe_of(loss_fn, 8).step(X, target=target)
    assert pipe_of(nn.MSELoss(), 8).step(X, target=GOAL).loss is not None


def test_rows_that_differ_in_length_cannot_be_compared() -> None:
    stages, x = {i: nn.Linear(DIM, DIM) for i in range(2)}, [torch.randn(1, length, DIM) for length in (2, 3)]
    pipe = Pipeline(
        stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport(),
        chunk=Presplit(),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="it could not be tried whether loss_fn is the mean over the rows"):
        pipe.step(x, target=x)


def flat(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), **options)


@pytest.mark.parametrize("n_microbatches", [2, 8])
def test_labels_of_which_some_are_ignored(n_microbatches: int) -> None:
    """A mean over labels was not told from a sum: rows with an ignored label were not looked at."""
    labels = torch.arange(24).view(8, 3) % DIM
    labels[:, 0] = -100
    if n_microbatches == 2:  # other rows, but as many in each microbatch
        labels[1, 1] = labels[5, 2] = -100
    x = X[:, None].repeat(1, 3, 1)
    for options in ({"reduction": "sum"}, {"weight": WEIGHT}):
        with pytest.raises(PipelineError, match="must return the mean over the rows"):
            pipe_of(partial(flat, **options), n_microbatches).step(x, target=labels)
    pipe = pipe_of(flat, n_microbatches)
    result = pipe.step(x, target=labels)
    with torch.no_grad():
        output = pipe.stages[1].module(pipe.stages[0].module(x))
    torch.testing.assert_close(result.loss, flat(output, labels))


def test_what_has_no_rows_does_not_hide_a_sum() -> None:
    class WithTable(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight[:1] * 2

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (output[0] - target).square().sum() + output[1].square().mean()

    stages = {0: nn.Linear(DIM, DIM), 1: WithTable(DIM, DIM)}
    pipe = Pipeline(
        stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=loss_fn, transport=LocalTransport()
    )  # fmt: skip
    with pytest.raises(PipelineError, match="must return the mean over the rows"):
        pipe.step(X, target=GOAL)


def test_every_microbatch_of_the_first_step_is_asked() -> None:
    mask = torch.cat([torch.ones(4, DIM), MASK[4:]])  # the first microbatch has the same number in each row
    with pytest.raises(PipelineError, match="must return the mean over the rows"):
        pipe_of(masked).step(X, target=(GOAL, mask))


def variance(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + output.var(0).mean()


def largest(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + 0.01 * output.abs().max()


def test_losses_that_one_row_does_not_have() -> None:
    with pytest.raises(PipelineError, match=r"got .* for four rows, and .* for each half"):
        pipe_of(variance, 2).step(X, target=GOAL)
    with pytest.warns(UserWarning, match="it could not be tried whether loss_fn is the mean over the rows"):
        pipe_of(variance, 4).step(X, target=GOAL)
    with pytest.raises(PipelineError, match="must return the mean over the rows"):
        pipe_of(largest).step(X, target=GOAL)


def test_a_loss_that_talks_to_other_processes_is_not_tried() -> None:
    """Another process may have fewer rows, and not try it: nobody would answer."""
    sums = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        count = torch.tensor(float(len(output)))
        dist.all_reduce(count)
        sums.append(count)
        return (output - target).square().sum() / count

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pipe_of(loss_fn).step(X, target=GOAL)
    finally:
        dist.destroy_process_group()
    assert len(sums) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nor_are_means_of_rounded_numbers(dtype: torch.dtype) -> None:
    assert pipe_of(F.mse_loss, dtype=dtype).step(X.to(dtype), target=GOAL.to(dtype)).loss is not None


def test_counts_of_classes_give_the_loss_of_the_batch() -> None:
    """What the error says to do."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, target, WEIGHT, reduction="sum"), WEIGHT[target].sum()

    pipe = pipe_of(loss_fn)
    result = pipe.step(X, target=LABELS)
    with torch.no_grad():
        output = pipe.stages[1].module(pipe.stages[0].module(X))
    torch.testing.assert_close(result.loss, F.cross_entropy(output, LABELS, WEIGHT))


@pytest.mark.parametrize("is_noisy", [False, True])
def test_it_is_looked_at_in_the_first_step_alone(is_noisy: bool) -> None:
    """A noisy loss cannot be judged, and would be called again in every step, for which a host must wait for a GPU."""
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return noisy(output, target) if is_noisy else F.mse_loss(output, target)

    pipe = pipe_of(loss_fn)
    pipe.step(X, target=GOAL)
    assert calls.count(4) == 2  # the microbatches
    assert len(calls) > 2
    calls.clear()
    pipe.step(X, target=GOAL)
    assert calls == [4, 4]


def test_losses_that_cancel_are_means() -> None:
    sign = torch.tensor([1.0, -1.0] * 4)[:, None]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (target * (1e4 + 1e-9 * output)).mean()  # of two rows all but nothing, in float32 some noise

    assert pipe_of(loss_fn).step(X, target=sign * (1 + 1e-6 * X)).loss is not None


class Stateful(nn.Module):
    """Counts its calls, by a buffer or an attribute, and weighs by them; a mean, or a sum and a count."""

    def __init__(self, by_buffer: bool, pair: bool) -> None:
        super().__init__()
        self.calls, self.by_buffer, self.pair, self.drawn = 0, by_buffer, pair, [0.0]
        if by_buffer:
            self.register_buffer("counted", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        self.calls += 1
        self.drawn.append(random.random())
        loss = F.mse_loss(output, target) * (1 + 0.1 * self.calls)
        return (loss * len(output), len(output)) if self.pair else loss


@pytest.mark.parametrize("by_buffer", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_calls_that_do_not_count_leave_a_loss_as_it_was(by_buffer: bool, pair: bool) -> None:
    loss_fn = Stateful(by_buffer, pair)
    pipe = pipe_of(loss_fn)
    random.seed(0)
    loss = pipe.step(X, target=GOAL).loss
    expected = [F.mse_loss(pipe.evaluate(X).outputs[i : i + 4], GOAL[i : i + 4]) for i in (0, 4)]
    torch.testing.assert_close(loss, (expected[0] * 1.1 + expected[1] * 1.2) / 2)
    assert (loss_fn.calls, len(loss_fn.drawn)) == (2, 3)


class Summed(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), torch.tensor(float(target.shape[0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_loss() -> None:
    """It cannot be called with other buffers, and need not be."""
    found = [pipe_of(loss).step(X, target=GOAL).loss for loss in (Summed(), torch.jit.script(Summed()))]
    torch.testing.assert_close(*found)


def test_a_loss_that_goes_over_to_half_precision() -> None:
    """What it is given is not: the mean of two rows differs from those of each by what is rounded."""
    pipe = pipe_of(lambda output, target: F.mse_loss(output.bfloat16(), target.bfloat16()))
    for seed in range(8):
        torch.manual_seed(seed)
        pipe.stages[1]._weighed = WeighedLoss()
        pipe.step(torch.randn(8, DIM), target=GOAL)


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_a_loss_under_autocast() -> None:
    """What it computes in half precision may be rounded in another way for one row than for two."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.float(), target) * (1 + 0.004 * (len(output) == 1))

    stages = {0: nn.Linear(DIM, DIM), 1: nn.Sequential(nn.Linear(DIM, DIM), Wide())}
    pipe = Pipeline(stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=loss_fn, transport=LocalTransport())
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(X, target=GOAL)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("is_here", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize(
    "count",
    [
        lambda rows: rows,
        lambda rows: float(rows),
        lambda rows: torch.tensor(rows),
        lambda rows: torch.tensor([rows], dtype=torch.float16),
        lambda rows: torch.tensor(float(rows), requires_grad=True),
    ],
    ids=["int", "float", "a tensor of int64", "of shape (1,)", "that needs a gradient"],
)
def test_counts_are_numbers_or_tensors(count: Callable[[int], Any], is_here: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(_later, "is_here", lambda number: is_here)
    pipe = pipe_of(lambda output, target: (squares(output, target), count(len(target))), 3)  # 3, 3 and 2 rows
    result = pipe.step(X, target=GOAL)
    assert result.loss is not None
    assert result.loss.dtype == torch.float32
    modules = [stage.module for stage in pipe.stages.values()]
    mine = [parameter.grad for module in modules for parameter in module.parameters()]
    for module in modules:
        module.zero_grad()
    loss = squares(modules[1](modules[0](X)), GOAL) / len(X)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(mine, [parameter.grad for module in modules for parameter in module.parameters()])


@pytest.mark.parametrize("is_here", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_count_of_the_output_is_refused(is_here: bool, as_tensor: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(_later, "is_here", lambda number: is_here)

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        return squares(output, target), output.detach().sum() if as_tensor else float(output.detach().sum())

    with pytest.raises(PipelineError, match=r"must depend on the target alone.*got .* for a microbatch, and .* with"):
        pipe_of(loss_fn).step(X, target=GOAL)


def test_a_count_is_one_number_and_may_be_none() -> None:
    with pytest.raises(PipelineError, match=r"the count that loss_fn returns must be one number; got .*\(4,\)"):
        pipe_of(lambda output, target: (squares(output, target), target.sum(1))).step(X, target=GOAL)
    hits = pipe_of(lambda output, target: ((output > target).sum() * 0, torch.zeros(())))
    result = hits.evaluate(X, target=GOAL)
    assert float(result.loss) == 0
    assert result.loss.dtype == torch.float32
