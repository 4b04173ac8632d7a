"""On a CUDA device: Triton kernels for F, I and W, the engine's own threads, and what is held."""

from __future__ import annotations

import pytest
import torch
from models import gpt
from torch import nn

from compare import assert_same_grads, twin
from compiled import compiled
from sternway import split

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
def test_split_equals_backward(inner: str, first_stage: bool) -> None:
    torch._dynamo.reset()
    model = gpt(64, 2).cuda()
    reference, fast = twin(model)[0], compiled(model, inner)
    for _ in range(2):
        x = torch.randn(2, 16, 64, device="cuda", requires_grad=not first_stage)
        their_x = x.detach().clone().requires_grad_(not first_stage)
        theirs = reference(their_x)
        grad = torch.randn_like(theirs)
        theirs.backward(grad)
        found, pending = split.backward_input(fast(x), grad, () if first_stage else x)
        pending.run()
        if not first_stage:
            torch.testing.assert_close(found, their_x.grad, rtol=1e-3, atol=1e-4)
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)


def test_dropout_has_one_mask() -> None:
    torch._dynamo.reset()
    weight = nn.Parameter(torch.eye(64, device="cuda"))
    fast = compiled(lambda x: nn.functional.dropout(x @ weight, 0.5), "inductor")
    x = torch.ones(32, 64, device="cuda", requires_grad=True)
    y = fast(x)
    found, pending = split.backward_input(y.sum(), None, x)
    pending.run()
    torch.testing.assert_close(found, y.detach())
    torch.testing.assert_close(weight.grad, torch.ones(64, 32, device="cuda") @ y.detach())
