"""Random small networks of the operations that the rules know: split equals a plain backward on each."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_split_equals_backward

DIM = 4


class Step(nn.Module):
    """One operation on tensors of shape (batch, DIM, DIM), of the kind that ``kind`` names."""

    def __init__(self, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        layers = {
            "linear": lambda: nn.Linear(DIM, DIM),
            "bare linear": lambda: nn.Linear(DIM, DIM, bias=False),
            "conv": lambda: nn.Conv1d(DIM, DIM, 3, padding=1),
            "norm": lambda: nn.LayerNorm(DIM),
            "rms": lambda: nn.RMSNorm(DIM),
            "group norm": lambda: nn.GroupNorm(2, DIM),
            "batch norm": lambda: nn.BatchNorm1d(DIM),
            "shared": lambda: shared,
            "attention": lambda: nn.Linear(DIM, 3 * DIM),
            "checkpoint": lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)),
        }
        self.layer = layers.get(kind, nn.Identity)()
        self.weight = (
            nn.Parameter(torch.randn(DIM, DIM) * 0.5) if kind in ("left", "scale", "slice", "low rank") else None
        )

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "left":
                return self.weight @ x
            case "scale":
                return x * self.weight
            case "slice":
                return torch.cat([x @ self.weight[:, :2], F.linear(x, self.weight[2:])], -1)
            case "low rank":
                return x @ (torch.eye(DIM) + self.weight[:, :1] @ self.weight[:1])
            case "residual":
                return x + x.roll(1, -1).tanh()
            case "self product":
                return torch.bmm(x, x.transpose(1, 2)).softmax(-1)
            case "attention":
                return F.scaled_dot_product_attention(*self.layer(x).chunk(3, -1))
            case "checkpoint":
                return checkpoint(self.layer, x, use_reentrant=False)
            case _:
                return self.layer(x)


KINDS = [
    *("linear", "bare linear", "conv", "norm", "rms", "group norm", "batch norm", "shared", "attention", "checkpoint"),
    *("left", "scale", "slice", "low rank", "residual", "self product"),
]


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    skips=st.lists(st.integers(0, 5), max_size=2),
    frozen=st.integers(0, 2**10),
    first_stage=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_networks(kinds: list[str], skips: list[int], frozen: int, first_stage: bool, seed: int) -> None:
    torch.manual_seed(seed)
    shared = nn.Linear(DIM, DIM)
    model = nn.ModuleList(Step(kind, shared) for kind in kinds).double()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not frozen >> index & 1)
    if first_stage and not any(p.requires_grad for p in model.parameters()):
        first_stage = False

    def call(model: nn.ModuleList, x: Tensor) -> Tensor:
        seen = [x]
        for index, step in enumerate(model):
            x = step(x.tanh())
            if index in skips:
                x = x + seen[index // 2]
            seen.append(x)
        return x + 0 * sum(p.sum() for p in model.parameters() if p.requires_grad) if not x.requires_grad else x

    x = torch.randn(3, DIM, DIM, dtype=torch.float64, requires_grad=not first_stage)
    assert_split_equals_backward(model, x, call=call, rtol=1e-7, atol=1e-9)
