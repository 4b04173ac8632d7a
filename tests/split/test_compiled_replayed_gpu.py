"""``mode="reduce-overhead"`` and its like on a GPU: Inductor's kernels in our graphs, with several calls in flight."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from captured_cases import floats
from models import gpt
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway import split
from sternway.split.compiled._backend import sternway
from sternway.state import BackwardState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CLOSE: dict[str, float] = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["whole", "blocks", "options"])
def test_three_in_flight_in_any_order(how: str) -> None:
    model = gpt(64, 2).cuda()
    reference, fast = twin(model)[0], model
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without CUDA graphs")
        if how == "whole":
            fast = torch.compile(model, backend=sternway, mode="reduce-overhead")
        elif how == "options":
            fast = torch.compile(model, backend=sternway, options={"triton.cudagraphs": True})
        else:
            for block in model:
                block.compile(backend=sternway, mode="reduce-overhead")
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            batches, grad = [floats(2, 16, 64) for _ in range(3)], torch.randn(2, 16, 64, device="cuda")
            outputs = [fast(x) for x in batches]
            kinds = {type(y.grad_fn).__name__ for y in outputs}
            assert kinds == {"CapturedCallBackward"}
            found = [split.backward_input(y, grad, x) for y, x in zip(outputs, batches, strict=True)]
            for index in order:
                assert set(found[index][1].deferred) == set(model.parameters())
                found[index][1].run()
            for x, (mine, _) in zip(batches, found, strict=True):
                theirs = x.detach().clone().requires_grad_()
                reference(theirs).backward(grad)
                torch.testing.assert_close(mine, theirs.grad, **CLOSE)
    assert_same_grads(model, reference, **CLOSE)


def test_plain_backwards_buffers_and_modes() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)).cuda()
    reference = twin(model)[0]
    fast = torch.compile(model, backend=sternway, mode="reduce-overhead")
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (model, reference)]
    for number in range(6):
        x = torch.randn(8, 16, device="cuda")
        losses = []
        for call, optimizer in zip((fast, reference), optimizers, strict=True):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, **CLOSE)
    torch.testing.assert_close(model[1].running_var, reference[1].running_var, **CLOSE)
    assert int(model[1].num_batches_tracked) == 6
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), reference.eval()(x), **CLOSE)


def test_dropout_draws_anew_in_each_replay() -> None:
    weight = nn.Parameter(torch.eye(64, device="cuda"))

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x @ self.weight, 0.5)

    fast: Any = torch.compile(Drops(), backend=sternway, mode="reduce-overhead")
    masks = []
    for _ in range(4):
        x = torch.ones(32, 64, device="cuda", requires_grad=True)
        y = fast(x)
        found, pending = split.backward_input(y.sum(), None, x)
        pending.run()
        torch.testing.assert_close(found, y.detach())
        masks.append(y.detach())
    torch.testing.assert_close(weight.grad, torch.ones(64, 32, device="cuda") @ sum(masks))
    assert not any(torch.equal(masks[0], mask) for mask in masks[1:])


def test_max_autotune_and_a_capture_of_what_makes_graphs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    reference = twin(model)[0]
    fast = torch.compile(model, backend=sternway, mode="max-autotune")
    stage = split.capture(fast, floats(32, 64))
    assert stage.refusals == []
    for call in (fast, stage, fast):
        x, grad = floats(32, 64), torch.randn(32, 64, device="cuda")
        y = call(x)
        assert type(y.grad_fn).__name__ == "CapturedCallBackward"
        split.backward_input(y, grad, x)[1].run()
        reference(x.detach()).backward(grad)
    assert_same_grads(model, reference, rtol=1e-2, atol=1e-2)


def test_functions_of_a_state_run_though_their_region_has_no_graphs() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.state = nn.Linear(16, 16), nn.Linear(16, 16), BackwardState()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.state.on_grad(self.first(x).sin(), lambda grad: grad * self.state.scale))

    model: Any = Shown().cuda()
    reference: Any = twin(model)[0]
    fast = torch.compile(model, backend=sternway, mode="reduce-overhead")
    for number in range(3):
        x, outputs = torch.randn(8, 16, device="cuda"), []
        for call, each in ((fast, model), (reference, reference)):
            outputs.append(call(x).sum())
            each.state.scale = 2.0 + number
            outputs[-1].backward()
        torch.testing.assert_close(*outputs, **CLOSE)
    assert_same_grads(model, reference, **CLOSE)
