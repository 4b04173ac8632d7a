"""What cannot be captured is named, and runs as it is; on a CUDA device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captured_cases import compare, dropout, floats
from torch import Tensor, nn

from compare import assert_same_grads
from sternway import split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


class Waits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x * 3


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum() * x


class ReadsHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.tensor(2.0)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) * x


class WaitsInBackward(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 if float(grad.abs().sum()) >= 0 else grad

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Waits, r"waits for a result of the GPU in the module 1, .*test_captured_refusals\.py line \d+"),
        (Chooses, r"waits for a result of the GPU in the module 1, .*test_captured_refusals\.py line \d+"),
        (ReadsHost, r"reads a tensor on the CPU, of shape \(\) in the module 1, .*test_captured_refusals\.py line \d+"),
        (WaitsInBackward, "CUDA cannot capture an operation"),
    ],
)
def test_what_cannot_be_captured_is_named_and_runs_as_it_is(kind: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"Sequential runs as it is, without CUDA graphs: .*{reason}"):
        stage = split.capture(model, floats(4, 8))
    for seed in range(2):
        x = floats(4, 8)
        torch.manual_seed(seed)
        stage(x).sum().backward()
        torch.manual_seed(seed)
        reference(x.detach().requires_grad_()).sum().backward()
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
    assert len(stage.refusals) == 1
    compare(dropout().cuda(), lambda: floats(8, 16))  # other captures are not concerned


def test_an_input_that_is_written_to_runs_as_it_is() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.warns(UserWarning, match="writes to one of its inputs"):
        stage = split.capture(nn.Sequential(WritesInput(), nn.Linear(4, 4)).cuda(), x)
    stage(x)
    assert torch.equal(x, 2 * torch.ones_like(x))
