"""Steps that are taken back, repeated or looked into leave what one process would: rates, buffers, the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sternway.errors import PipelineError
from sternway.pipeline import GradScaler, LocalTransport, Pipeline

DIM = 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, DIM), torch.randn(4, DIM)


def pipe_of(model: nn.Module | dict[int, nn.Module], **options: Any) -> Pipeline:
    options = {"n_microbatches": 2, "transport": LocalTransport()} | options
    return Pipeline(model, schedule="1f1b", ranks=2, loss_fn=F.mse_loss, **options)


def plain_step(model: nn.Module, x: Tensor, target: Tensor, microbatches: int = 2) -> None:
    for rows, goal in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        (F.mse_loss(model(rows), goal) / microbatches).backward()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


class Counting(torch.optim.SGD):
    """Keeps in its groups how many steps it took, and takes smaller ones each time."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["taken"] = group.get("taken", 0) + 1
        group["lr"] *= 0.5
        super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Counting])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_repeated_step_has_the_learning_rate_that_it_had(kind: type[torch.optim.Optimizer], by_tensor: bool) -> None:
    """A scheduler has set the next one by then. Groups in which an optimizer counts were counted up twice."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    plain = copy.deepcopy(model)
    pipe, rate = pipe_of(model), torch.tensor(0.5) if by_tensor else 0.5
    mine, other = kind(pipe.parameters(), lr=copy.deepcopy(rate)), kind(plain.parameters(), lr=copy.deepcopy(rate))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.1) for each in (mine, other)]
    for _ in range(3):
        x, target = batch()
        pipe.step(x, target=target)
        pipe.optimizer_step(mine, max_norm=0.1)
        plain_step(plain, x, target)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        other.step(), other.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    pipe.settle()
    assert_same(model, plain)
    options = [{key: value for key, value in each.param_groups[0].items() if key != "params"} for each in (mine, other)]
    assert options[0] == options[1]


class Decaying(torch.optim.SGD):
    """Writes to gradients, as optimizers may."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(parameter, alpha=0.5)
        super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Decaying])
def test_a_repeated_step_has_the_gradients_that_it_had(kind: type[torch.optim.SGD]) -> None:
    """SGD adds its momentum to them, if that is nesterov's and it takes all at once, as by default on a GPU."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    plain = copy.deepcopy(model)
    pipe = pipe_of(model)
    mine, other = (kind(each.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True) for each in (pipe, plain))
    for number in range(6):
        x, target = batch()
        limit = 0.01 if number % 2 else 100.0  # so that every second step is repeated
        pipe.step(x, target=target)
        pipe.optimizer_step(mine, max_norm=limit)
        plain_step(plain, x, target)
        nn.utils.clip_grad_norm_(plain.parameters(), limit)
        other.step(), other.zero_grad()
    pipe.settle()
    assert_same(model, plain)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    pipe = pipe_of(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    with pytest.raises(PipelineError, match=r"cannot run steps of a pipeline by itself.*got LBFGS"):
        pipe.optimizer_step(torch.optim.LBFGS(pipe.parameters()))


class Normed(nn.Module):
    """Statistics in a module that is a stage's first, and a switch for infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * (float("inf") if self.on else 1.0)


@pytest.mark.parametrize("on_trial", [False, True])
def test_a_skipped_step_changes_statistics_once(on_trial: bool) -> None:
    """To find the module, the step runs again. That failed for whole models in one process, and counted twice."""
    model = Normed()
    plain, pipe = copy.deepcopy(model), pipe_of(model)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, target = batch()
    model.on = True
    if on_trial:
        pipe.step(x, target=target)
        pipe.optimizer_step(optimizer, nonfinite="skip")
        pipe.settle()
    else:
        assert pipe.step(x, target=target, nonfinite="skip").nonfinite is not None
    plain_step(plain, x, target)
    assert pipe.skipped == 1
    assert_same(model, plain)


class Fading(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.factor = self.factor * 0.5
        return self.linear(x) * self.factor


class Scaling(nn.Linear):
    """Changes the batch in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@pytest.mark.parametrize("kind", [Fading, Scaling])
def test_a_step_that_runs_again_begins_as_before(kind: type[nn.Module]) -> None:
    first = kind(DIM, DIM) if kind is Scaling else kind()
    model = nn.Sequential(first, nn.Linear(DIM, DIM))
    plain, pipe = copy.deepcopy(model), pipe_of({0: model[0], 1: model[1]}, n_microbatches=1)
    mine, other = torch.optim.SGD(pipe.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        x, target = batch()
        again = x.clone()
        pipe.step(x, target=target)
        pipe.optimizer_step(mine, max_norm=0.1)
        plain_step(plain, again, target, 1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        other.step(), other.zero_grad()
        assert torch.equal(x, again)
    pipe.settle()
    assert_same(model, plain)


def test_scaled_gradients_are_not_stepped_with() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    pipe = pipe_of(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, target = batch()
    pipe.step(x, target=target)
    with pytest.raises(PipelineError, match=r"with the gradients of the scaled loss; got .*scaler=.*scaler\.step"):
        pipe.optimizer_step(optimizer)
    scaler.unscale_(optimizer)
    pipe.optimizer_step(optimizer)
    pipe.settle()


def _complex_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def test_the_norm_of_complex_gradients() -> None:
    """It had the real parts alone."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, dtype=torch.complex64) for _ in range(2)))
    plain, x = copy.deepcopy(model), torch.randn(4, DIM, dtype=torch.complex64)
    pipe = Pipeline(
        model, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=_complex_loss, sample=x[:1],
        transport=LocalTransport(),
    )  # fmt: skip
    pipe.step(x, target=x)
    _complex_loss(plain(x), x).backward()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


class Remembering(nn.Module):
    """Adds its own last output, and counts its calls, which weigh it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen, self.pair = nn.Linear(DIM, DIM), 0, [0], (torch.zeros(()), 0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        if not hasattr(self, "memory"):
            self.memory = torch.zeros(())
        y = torch.tanh(self.linear(x)) + 0.5 * self.memory + 0.1 * self.pair[0] + 0.01 * len(self.seen)
        self.memory, self.pair = y.detach() / self.calls, (y.detach(), self.calls)
        return y


class Between(nn.Module):
    """Counts in code between the modules, and makes a table when it needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(4))
        self.count, self.rows = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if len(x) > self.rows:
            self.rows = len(x)
            self.register_buffer("table", torch.linspace(0, 1, len(x)).view(-1, 1), persistent=False)
        for layer in self.layers:
            x = layer(x) * (1 + 0.1 * self.count) + self.table
        return x


class Scaled(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(())), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return F.mse_loss(output * self.scale, target) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("whole", [False, True])
def test_a_repeated_step_finds_attributes_and_the_loss_as_they_were(whole: bool) -> None:
    """Counts were counted twice, memories were those of the step itself, and the loss had two gradients."""
    model = Between() if whole else nn.Sequential(Remembering(), Remembering())
    loss_fn = Scaled()
    plain, plain_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    options = {"loss_fn": loss_fn, "schedule": "1f1b", "n_microbatches": 2, "transport": LocalTransport(), "ranks": 2}
    stages = {"sample": torch.zeros(2, DIM), "cuts": ["layers.2"]} if whole else {}
    pipe = Pipeline(model if whole else dict(enumerate(model)), **options, **stages)
    mine, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain))
    for _ in range(3):
        x, target = batch()
        pipe.step(x, target=target)
        pipe.optimizer_step(mine, max_norm=0.1)
        for rows, goal in zip(x.chunk(2), target.chunk(2), strict=True):
            (plain_loss(plain(rows), goal) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        other.step(), other.zero_grad()
    pipe.settle()
    assert_same(model, plain)
    torch.testing.assert_close(loss_fn.scale.grad, plain_loss.scale.grad)
    assert_same(loss_fn, plain_loss)
    assert loss_fn.calls == plain_loss.calls == 6


def test_an_optimizer_of_some_parameters_cannot_clip() -> None:
    """A repeated step clipped its own gradients alone, and the next optimizer's norm was that of the rest."""
    pipe = pipe_of(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    x, target = batch()
    pipe.step(x, target=target)
    matrices = torch.optim.SGD([each for each in pipe.parameters() if each.ndim == 2])
    with pytest.raises(PipelineError, match=r"must have all parameters with gradients.*got one without 0\.bias"):
        pipe.optimizer_step(matrices, max_norm=0.1)
    pipe.optimizer_step(matrices)
    pipe.optimizer_step(torch.optim.SGD([each for each in pipe.parameters() if each.ndim == 1]))
