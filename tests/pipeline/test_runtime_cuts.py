"""Unmodified models, cut at module calls while they run: equal to plain autograd, or refused with the line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads
from sternway.pipeline import LocalTransport, Pipeline

DIM = 6


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class Layers(nn.Module):
    """A list of layers, with glue between them that subclasses write."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(count))


class GlueEverywhere(Layers):
    """Glue before, between and after the layers, with parameters and functions of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(DIM))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.register_buffer("table", torch.linspace(0, 1, DIM))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device)
        angle = torch.outer(torch.arange(x.shape[0], dtype=x.dtype), self.table).cos()
        h = x * mask + self.place
        for number, layer in enumerate(self.layers):
            h = (layer(h) + self.table * number).tanh() * mask + angle
        return F.layer_norm(h, (DIM,)) * self.gain


class FunctionalTie(Layers):
    """The first layer's weight is used again at the end, and a weight of glue in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x) * self.scale
        for layer in self.layers[1:]:
            h = h + layer(h).tanh()
        return F.linear(h * self.scale, self.layers[0].weight)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(linear() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], -1)).tanh()
        return x


class CrossAttention(nn.Module):
    """An encoder whose output every layer of the decoder uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
        self.decoder = nn.ModuleList(nn.MultiheadAttention(DIM, 2, batch_first=True) for _ in range(3))
        self.head = linear()

    def forward(self, x: Tensor, *, source: Tensor) -> Tensor:
        memory = self.encoder(source)
        for layer in self.decoder:
            x = x + layer(x, memory, memory, need_weights=False)[0]
        return self.head(x)


@dataclass
class Result:
    last: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "text"


class Collects(Layers):
    """All hidden states are returned, and the loss uses them."""

    def forward(self, x: Tensor) -> Result:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        return Result(x, tuple(hidden))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Trees(nn.Module):
    """Pieces that take and return tuples, dicts and dataclasses; several streams; results of topk and max."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, pair: Pair, *, extra: dict[str, Any]) -> dict[str, Any]:
            return {"pair": Pair(self.a(pair.left) * extra["scale"], self.b(pair.right)), "n": extra["n"] + 1}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Trees.Two() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pair, n = Pair(x, x.flip(-1)), 0
        for layer in self.layers:
            made = layer(pair, extra={"scale": pair.right.detach().topk(2).values.sum(-1, keepdim=True), "n": n})
            pair, n = made["pair"], made["n"]
            pair = Pair(pair.left + pair.right.max(-1).values[:, None], pair.right)
        return pair.left * n + pair.right


class InPlace(Layers):
    """In-place operations on inputs, on what pieces return, and as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.sub_(0.5).mul_(2.0)
        for layer in self.layers:
            x = self.act(layer(x)) * 1.5
            x += 1.0
            x[:, 0] = 0.25
        return x


class InPlaceInput(Layers):
    """Changes its own argument, as preprocessing does."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(2.0)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class InPlacePieces(nn.Module):
    """Stages begin with an in-place operation: a piece writes to what it is given."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.layers = nn.Sequential(*(InPlacePieces.Writes() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x) + 1)


class BatchNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(linear(), nn.BatchNorm1d(DIM), nn.ReLU(inplace=True)) for _ in range(3)),
            nn.BatchNorm1d(DIM, affine=False),
            linear(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Reused(Layers):
    """One layer is called again and again, in several stages."""

    def __init__(self) -> None:
        super().__init__(1)
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + self.layers[0](x).tanh()
        return self.head(x)


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=False)
        return x


class WritesIntoBuffer(Layers):
    """Results are written into a tensor that was made before."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], len(self.layers), DIM)
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            out[:, number] = x
        return out.sum(1)


class SkipsNoGrad(Layers):
    """Integer and detached values cross, too."""

    def forward(self, x: Tensor) -> Tensor:
        order = self.layers[0](x).detach().argsort(-1)
        with torch.no_grad():
            scale = self.layers[0](x).abs().mean(-1, keepdim=True)
        for layer in self.layers[1:]:
            x = layer(x).gather(-1, order) / scale
        return x


class Stubborn(Layers):
    """Catches whatever it can, and cleans up."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth = 0
        for layer in self.layers:
            self.depth += 1
            try:
                x = layer(x).tanh()
            except Exception:
                x = torch.zeros_like(x)
            finally:
                self.depth -= 1
        assert self.depth == 0
        return x


class SameMask(nn.Module):
    """Layers that are all given one mask, and convert it to the type that it has."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + self.layer(x).tanh() * mask.to(x.dtype).contiguous()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SameMask.Masked() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 1).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return x


def source_of(rows: int) -> Tensor:
    return torch.randn(rows, 3, DIM)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "glue": (GlueEverywhere, lambda rows: {"x": torch.randn(rows, DIM)}),
    "glue, masked": (GlueEverywhere, lambda rows: {"x": torch.randn(rows, DIM), "mask": torch.rand(rows, 1)}),
    "functional tie": (FunctionalTie, lambda rows: {"x": torch.randn(rows, DIM)}),
    "u-net": (UNet, lambda rows: {"x": torch.randn(rows, DIM)}),
    "cross attention": (CrossAttention, lambda rows: {"x": source_of(rows), "source": source_of(rows)}),
    "collected": (Collects, lambda rows: {"x": torch.randn(rows, DIM)}),
    "trees": (Trees, lambda rows: {"x": torch.randn(rows, DIM)}),
    "in place": (InPlace, lambda rows: {"x": torch.randn(rows, DIM)}),
    "input in place": (InPlaceInput, lambda rows: {"x": torch.randn(rows, DIM)}),
    "pieces in place": (InPlacePieces, lambda rows: {"x": torch.randn(rows, DIM)}),
    "batch norms": (BatchNorms, lambda rows: {"x": torch.randn(rows, DIM)}),
    "reused": (Reused, lambda rows: {"x": torch.randn(rows, DIM)}),
    "checkpointed": (Checkpointed, lambda rows: {"x": torch.randn(rows, DIM)}),
    "written into": (WritesIntoBuffer, lambda rows: {"x": torch.randn(rows, DIM)}),
    "no gradient": (SkipsNoGrad, lambda rows: {"x": torch.randn(rows, DIM)}),
    "same mask": (SameMask, lambda rows: {"x": torch.randn(rows, DIM)}),
    "stubborn": (Stubborn, lambda rows: {"x": torch.randn(rows, DIM)}),
}


def loss(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, Result):
        assert output.note == "text"
        return sum(((h - target) ** 2).mean() for h in output.hidden) + output.last.mean()
    return ((output - target.expand_as(output)) ** 2).mean()


def plain(model: nn.Module, batch: dict[str, Tensor], target: Tensor, parts: int) -> Tensor:
    """The loss and gradients of plain autograd, microbatch by microbatch, as a batch norm sees them."""
    total = torch.zeros(())
    for i in range(parts):
        piece = {name: value.chunk(parts)[i] for name, value in batch.items()}
        value = loss(model(**piece), target.chunk(parts)[i]) / parts
        value.backward()
        total += value.detach()
    return total


def assert_cut_equals_plain(case: str, schedule: str, **options: Any) -> Pipeline:
    make, data = CASES[case]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    batch, target = data(8), torch.randn(8, 1)
    if "source" in batch:
        target = target[..., None]
    before = {name: value.clone() for name, value in batch.items()}
    pipe = Pipeline(
        model, schedule=schedule, n_microbatches=4, ranks=2, loss_fn=loss, transport=LocalTransport(), **options
    )
    assert_same_grads(model, reference)  # nothing was done to it yet
    for _ in range(2):
        torch.manual_seed(1)
        result = pipe.step(**{name: value.clone() for name, value in before.items()}, target=target)
        torch.manual_seed(1)
        expected = plain(reference, {name: value.clone() for name, value in before.items()}, target, 4)
        torch.testing.assert_close(result.loss, expected)
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[name], buffer)
    names = {name for part in pipe.stages.values() for name in part.module.state_dict()}
    assert names == set(model.state_dict())
    return pipe


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_autograd(case: str, schedule: str) -> None:
    sample = {name: value.clone() for name, value in CASES[case][1](2).items()}
    pipe = assert_cut_equals_plain(case, schedule, sample=sample)
    assert len(pipe.stages) == (4 if schedule == "zb-v" else 2)


@pytest.mark.parametrize("case", ["glue", "u-net", "in place", "batch norms", "reused"])
def test_a_searched_plan_equals_plain_autograd(case: str) -> None:
    assert_cut_equals_plain(case, "auto", sample=CASES[case][1](2))


@pytest.mark.parametrize("case", ["glue, masked", "u-net", "trees", "in place", "batch norms", "cross attention"])
def test_without_a_sample_the_first_batch_is_looked_at(case: str) -> None:
    assert_cut_equals_plain(case, "zb-h1")
