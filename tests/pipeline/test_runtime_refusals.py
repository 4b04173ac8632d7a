"""What cannot be cut is refused, with the line; what depends on the mode or on chance is as in one process."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway import pipeline
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.step._random import seed_forward, step_seed

DIM = 6
X = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))


def build(model: nn.Module, microbatches: int = 1, **options: Any) -> Pipeline:
    options = {"schedule": "1f1b", "ranks": 2, "sample": X[:2], "cuts": ["layers.2"]} | options
    return Pipeline(model, n_microbatches=microbatches, loss_fn=F.mse_loss, transport=LocalTransport(), **options)


def assert_step_equals_plain(model: nn.Module, *, microbatches: int = 1, **options: Any) -> Pipeline:
    """One microbatch, and each stage draws the random numbers that the pipeline's does."""
    reference = copy.deepcopy(model)
    pipe = build(model, microbatches, **options)
    torch.manual_seed(3)
    result = pipe.step(X, target=X)
    begin = partial(seed_forward, step_seed(0), microbatch=0, device=torch.device("cpu"))
    handles = [
        reference.get_submodule(name).register_forward_pre_hook(lambda *_, stage=stage: begin(stage=stage))
        for stage, name in enumerate(pipe._plan.cuts or (), start=1)
    ]
    begin(stage=0)
    loss = F.mse_loss(reference(X), X)
    for handle in handles:
        handle.remove()
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)
    return pipe


class ReadsValue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0 and x.mean() > 0:
                x = -x
        return x


def test_code_that_reads_an_activation_between_stages_is_refused_with_its_line() -> None:
    with pytest.raises(PipelineError, match=r"reads a value that they computed.*test_runtime_refusals\.py:\d+: if num"):
        build(ReadsValue())
    with pytest.raises(PipelineError, match="reads a value that they computed"):
        build(ReadsValue(), cuts="balanced")
    with pytest.raises(PipelineError, match="reads a value that they computed"):
        build(ReadsValue(), sample=None).step(X, target=X)


class ReadsAtTheEnd(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if x.mean() > 100 else x * 2


def test_the_last_stage_may_read_its_values() -> None:
    assert_step_equals_plain(ReadsAtTheEnd(), microbatches=2)


class LayerDrop(Layers):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.chance:
                continue
            x = x + layer(x)
        return x


def test_random_numbers_that_decide_are_the_same_in_every_stage() -> None:
    pipe = assert_step_equals_plain(LayerDrop(0.0))
    pipe.eval()
    assert pipe.evaluate(X, target=X).loss is not None
    with pytest.raises(PipelineError, match="must call a module of every stage; got none of stage 1"):
        build(LayerDrop(1.0), sample=None, cuts=["layers.2"]).step(X, target=X)


class Noise(Layers):
    """Random numbers in glue: some are used in two stages, some are drawn from inputs alone."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[0], DIM).argsort(-1)
        x = F.dropout(x, 0.5, self.training).gather(-1, order)
        for layer in self.layers:
            x = layer(x) + 0.1 * torch.randn_like(x)
        return x.gather(-1, order.argsort(-1))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_random_numbers_in_glue(schedule: str) -> None:
    assert_step_equals_plain(Noise(), schedule=schedule)


class PythonNoise(Layers):
    """A mask that numpy draws, of which both stages must have the same."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor(numpy.random.rand(DIM) < 0.5)
        for layer in self.layers:
            x = layer(x).masked_fill(mask, 0.1)
        return x


def test_random_numbers_of_numpy() -> None:
    model = PythonNoise()
    reference = copy.deepcopy(model)
    pipe = build(model)
    numpy.random.seed(3)
    pipe.step(X, target=X)
    numpy.random.seed(3)
    F.mse_loss(reference(X), X).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


class SameTwice(Layers):
    """One tensor is two arguments."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        base = labels * 2.0
        for layer in self.layers:
            x = layer(x) + labels
        return x - base


def test_one_tensor_as_two_arguments() -> None:
    model = SameTwice()
    reference = copy.deepcopy(model)
    pipe = build(model, 2, sample=(X[:2], X[:2]))
    pipe.step(X, labels=X, target=X)
    F.mse_loss(reference(X, X), X).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


class Dropped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(self.drop(layer(x)), 0.5, self.training)
        return x if self.training else x * 3


def test_the_mode_is_read_when_it_runs() -> None:
    model = Dropped()
    pipe = assert_step_equals_plain(model)
    trained = pipe.step(X, target=X, return_outputs=True).outputs[0].detach()
    pipe.eval()
    expected = model(X)
    assert not model.training
    torch.testing.assert_close(pipe.step(X, target=X, return_outputs=True).outputs[0], expected)
    assert not model.training
    pipe.train()
    torch.testing.assert_close(pipe.evaluate(X).outputs, expected.detach())
    assert model.training
    assert not torch.equal(trained, expected)


class Side(Layers):
    """A layer leaves a value in an attribute, which other code uses."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            self.extra = self.layer(x).square().mean()
            return x + 1

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Side.Leaves() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + sum(layer.extra for layer in self.layers)


def test_a_value_that_is_not_returned_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"layers\.\d makes a value that other code uses, but does not return it"):
        build(Side())


class Counts(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_buffer_that_glue_changes_is_refused() -> None:
    model = Counts()
    with pytest.raises(PipelineError, match="code between the modules changes the buffer steps"):
        build(model)
    assert model.steps == 0


class NormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[1](self.layers[2](x))


def test_statistics_of_two_stages_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"layers\.1 is called twice and changes its buffers"):
        build(NormTwice(), cuts=["layers.2"])


class SharedMemory(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        part = x[:, :2]
        x = self.layers[1](x.clone()) + part.sum()
        h = self.layers[2](x)
        part.mul_(2.0)
        return self.layers[3](h) + part.sum() + self.layers[0](x * 0).sum()


class WritesBase(Layers):
    """A view made in one stage changes because a later stage writes to what it shows."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.layers[0](x) * 1.0
        view = base[:, :2]
        h = self.layers[1](x)
        h = self.layers[2](h)
        base.mul_(2.0)
        return self.layers[3](h) + base + view.sum()


def test_memory_that_two_stages_share_is_refused() -> None:
    with pytest.raises(PipelineError, match="changed in place through another tensor that shares its memory"):
        build(WritesBase())


class TwoWays(Layers):
    def forward(self, x: Tensor, *, double: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if double and number == 1:
                x = x * 2
        return x


def test_another_way_than_that_of_the_sample() -> None:
    model = TwoWays()
    reference = copy.deepcopy(model)
    pipe = build(model, sample={"x": X[:2], "double": False})
    pipe.step(X, double=False, target=X)
    F.mse_loss(reference(X, double=False), X).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)
    with pytest.raises(PipelineError, match=r"was not sent to it.*layers\.2 at .*x = layer\(x\)"):
        pipe.step(X, double=True, target=X)


class Backwards(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def test_the_order_of_the_calls_comes_from_the_sample() -> None:
    assert_step_equals_plain(Backwards(), cuts=["layers.1"])
    with pytest.raises(PipelineError, match=r"in the order in which the forward calls.*Fix: pass sample="):
        build(Backwards(), sample=None).step(X, target=X)


class Tied(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.layers[0].weight)


def test_who_uses_a_parameter_comes_from_the_sample() -> None:
    pipe = assert_step_equals_plain(Tied(), microbatches=2)
    assert float(pipe.clip_grad_norm_(1e9)) > 0
    with pytest.raises(PipelineError, match=r"layers\.0\.weight is used in stage 1, but was given to another"):
        build(Tied(), sample=None).step(X, target=X)


def test_names_that_alias_a_parameter() -> None:
    model = Layers()
    model.forward = lambda x: model.layers[3](model.layers[2](model.layers[1](model.layers[0](x))))
    model.layers[3].weight = model.layers[0].weight
    model.register_module("alias", model.layers[0])
    model.shared = model.layers[0].weight
    pipe = build(model)
    pipe.step(X, target=X)
    assert model.shared.grad is not None
    assert {n for part in pipe.stages.values() for n in part.module.state_dict()} == set(model.state_dict())


class Bare(nn.Module):
    """A value that only autograd sees: a custom Function between the layers."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Bare.Double.apply(layer(x))
        return x


def test_a_function_of_autograd_in_glue() -> None:
    assert_step_equals_plain(Bare(), microbatches=2)


def test_stages_that_begin_in_place() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM)))
    reference = copy.deepcopy(model)
    pipe = build(model, microbatches=2, cuts=["1"], schedule="zb-h1")
    for _ in range(2):
        pipe.step(X, target=X)
        F.mse_loss(reference(X), X).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_profile_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(), nn.Linear(DIM, DIM))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pipeline.profile(model, X, repeats=1)
    build(model, cuts="balanced", schedule="auto", microbatches=2, sample=X)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


class Nested(nn.Module):
    """Two large pieces: they are entered until there are enough."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Tied(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def test_a_profile_runs_no_hooks_of_parameters() -> None:
    """An optimizer step in a hook was taken for each run of the sample."""
    model, seen = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))), list[Tensor]()
    before = copy.deepcopy(model.state_dict())

    def descend(parameter: Tensor) -> None:
        seen.append(parameter)
        parameter.data.sub_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
        parameter.register_hook(lambda grad: seen.append(grad))
    pipe = build(model, schedule="auto", cuts="balanced")
    assert not seen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pipe.step(X, target=X)
    assert len(seen) == 16


def test_large_pieces_are_entered() -> None:
    pipe = assert_step_equals_plain(Nested(), cuts="balanced", schedule="zb-v", sample={"x": X[:2]}, microbatches=2)
    assert len(pipe.stages) == 4
    text = repr(pipe)
    assert re.search(r"\n  cuts      encoder\.layers\.\d, ", text)
    assert re.search(r"\n  crosses   to encoder\.layers\.\d: encoder\.layers\.\d\n", text)


def test_hooks_of_modules_run() -> None:
    model = Tied()
    seen: list[int] = []
    model.layers[3].register_forward_hook(lambda module, inputs, output: seen.append(len(inputs)) or output * 2)
    reference = copy.deepcopy(model)
    pipe = build(model)
    seen.clear()
    pipe.step(X, target=X)
    assert seen == [1]
    F.mse_loss(reference(X), X).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_model_without_weights_needs_a_sample() -> None:
    with torch.device("meta"):
        model = Dropped()
    with pytest.raises(PipelineError, match=r"needs a sample, on the first rank; got none. Fix: pass sample="):
        Pipeline(
            model,
            schedule="1f1b",
            n_microbatches=2,
            ranks=2,
            transport=LocalTransport(),
            loss_fn=F.mse_loss,
            weights=lambda names: {},
        )


class Circle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.itself = nn.Linear(DIM, DIM), self

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_module_that_is_in_itself() -> None:
    """Modes of such a module cannot be set by torch either; it must not be looked through for ever."""
    with pytest.raises(PipelineError, match="RecursionError"):
        build(nn.Sequential(Circle(), nn.Linear(DIM, DIM)), cuts=["1"])
