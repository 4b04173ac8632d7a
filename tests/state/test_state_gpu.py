"""On a GPU: Inductor with its CUDA kernels, and with CUDA graphs asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway.state import BackwardState
from ways import no_recompile

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_hooks_run_at_every_step_and_keep_what_they_see(mode: str) -> None:
    state, kept, copies = BackwardState(), [], []
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    x = torch.randn(64, 256, device="cuda")
    reference, _ = twin(model, x)

    def keep(grad: Tensor) -> None:
        kept.append(grad)
        copies.append(grad.clone())

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            x = state.on_grad(layer(x), keep)
        return x.softmax(-1)

    compiled = torch.compile(forward, fullgraph=True, mode=mode)
    weight = torch.randn(64, 256, device="cuda")
    with no_recompile():
        for _ in range(4):
            (compiled(x) * weight).sum().backward()
            (reference(x).softmax(-1) * weight).sum().backward()
    assert len(kept) == 12
    for tensor, copy in zip(kept, copies, strict=True):
        assert torch.equal(tensor, copy)
    assert_same_grads(model, reference, rtol=1e-2, atol=1e-3)
