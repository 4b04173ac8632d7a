"""Random forwards, cut anywhere: every one equals plain autograd, or is refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM, LAYERS = 4, 5


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Program(nn.Module):
    """Layers in order, and between them random steps on the values so far."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.scale, self.shift = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("table", torch.randn(DIM))
        names = [name for name in dir(self) if name.startswith("do_")]
        self.steps: list[tuple[str, int, int]] = []
        for number in range(LAYERS):
            self.steps.append((f"layer {number}", draw.randrange(1 << 16), 0))
            for _ in range(draw.randrange(5)):
                self.steps.append((draw.choice(names), draw.randrange(1 << 16), draw.randrange(1 << 16)))
        self.used = [draw.randrange(1 << 16) for _ in range(3)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = [x * 1.0]
        for name, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if name.startswith("layer"):
                made = self.layers[int(name.split()[1])](values[-1 - i % min(2, len(values))])
            else:
                made = getattr(self, name)(a, b, mask)
            if made is not None:
                values.append(made)
        return values[-1] + sum(values[i % len(values)] for i in self.used)

    def do_add(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return a + b

    def do_mask(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        if mask is None:
            mask = torch.ones(len(a), 1)
        return a * mask.to(a.dtype)

    def do_scale(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return a * self.scale

    def do_shift(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return (a + self.shift + self.table).tanh()

    def do_tie(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return F.linear(a, self.layers[0].weight)

    def do_norm(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return self.norm(a)

    def do_split(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        left, right = a.chunk(2, -1)
        return torch.cat([right, b[:, :2] * left], -1)

    def do_sort(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        found = a.sort(-1)
        return b.gather(-1, found.indices) + found.values

    def do_detach(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        with torch.no_grad():
            fixed = a.abs().mean(-1, keepdim=True)
        return b / (fixed + 1)

    def do_write(self, a: Tensor, b: Tensor, mask: Any) -> None:
        a += b.detach() * 0.5

    def do_set(self, a: Tensor, b: Tensor, mask: Any) -> None:
        a[:, 0] = b[:, 1].detach()

    def do_fill(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        made = torch.zeros(len(a), DIM)
        made[:, 1:] = a[:, 1:]
        return made

    def do_view(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return a.view(-1, DIM)

    def do_same(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return F.dropout(a.contiguous(), 0.5, False)

    def do_function(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return Double.apply(a)

    def do_again(self, a: Tensor, b: Tensor, mask: Any) -> Tensor:
        return self.layers[1](a)


def plain(model: Program, x: Tensor, mask: Tensor | None, target: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(2):
        part = {} if mask is None else {"mask": mask.chunk(2)[i]}
        loss = F.mse_loss(model(x.chunk(2)[i].clone(), **part), target.chunk(2)[i]) / 2
        loss.backward()
        total += loss.detach()
    return total


def run(seed: int) -> str:
    """Whether the program was cut and equal, refused, or is none that plain autograd runs."""
    model, draw = Program(seed), random.Random(seed + 1)
    reference = copy.deepcopy(model)
    x, target = torch.randn(6, DIM), torch.randn(6, DIM)
    mask = torch.rand(6, 1) if seed % 2 else None
    batch = {"x": x} if mask is None else {"x": x, "mask": mask}
    try:
        expected = plain(reference, x, mask, target)
    except RuntimeError:
        return "not run by autograd either"
    cuts = sorted(draw.sample(range(1, LAYERS), 2))
    try:
        pipe = Pipeline(
            model,
            schedule=draw.choice(["1f1b", "zb-h1"]),
            n_microbatches=2,
            ranks=3,
            cuts=[f"layers.{cut}" for cut in cuts],
            loss_fn=F.mse_loss,
            sample={name: value[:2] for name, value in batch.items()} if seed % 3 else None,
            transport=LocalTransport(),
        )
        result = pipe.step(**batch, target=target)
    except PipelineError as error:
        return f"refused: {error}"
    torch.testing.assert_close(result.loss, expected)
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-5)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)
    return "equal"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs_are_equal_or_refused(first: int) -> None:
    found = [run(seed) for seed in range(first, first + 20)]
    assert found.count("equal") >= 5
