"""Autocast, number types, hooks on saved tensors, anomaly mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import convnet, gpt, llama
from torch import Tensor, nn

from compare import assert_same_grads, assert_split_equals_backward, names, twin
from sternway import split
from sternway.errors import PendingError


@pytest.mark.parametrize("make", [lambda: gpt(16, 2), lambda: llama(16, 2)])
def test_autocast(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model = make()
    pending = assert_split_equals_backward(
        model, torch.randn(2, 5, 16, requires_grad=True), call=call, rtol=2e-2, atol=2e-2
    )
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert {n for n, _ in model.named_parameters() if "norm" not in n} <= names(model, pending.deferred)


def test_autocast_gives_the_first_gradients_exactly() -> None:
    torch.manual_seed(0)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    assert_split_equals_backward(
        gpt(16, 2), torch.randn(2, 5, 16, requires_grad=True), call=call, rounds=1, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_number_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 5e-2}
    assert_split_equals_backward(
        gpt(16, 2).to(dtype), torch.randn(2, 5, 16, dtype=dtype, requires_grad=True), **tolerance
    )


def test_mixed_number_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.double()).float()).double() + x.double()

    assert_split_equals_backward(Mixed(), torch.randn(5, 4, requires_grad=True))


def test_channels_last() -> None:
    model = convnet(8, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    assert_split_equals_backward(model, x, rtol=1e-4, atol=1e-5)
    assert model[0].weight.grad.stride() == model[0].weight.stride()


def test_saved_tensors_hooks_unpack_as_often_as_in_a_plain_backward() -> None:
    counts = {"pack": 0, "unpack": 0}

    def pack(tensor: Tensor) -> Tensor:
        counts["pack"] += 1
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        counts["unpack"] += 1
        return tensor

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(x)

    model, x = gpt(16, 2), torch.randn(2, 5, 16, requires_grad=True)
    call(model, x).sum().backward()
    plain = dict(counts)
    model.zero_grad()
    x.grad = None
    pending = assert_split_equals_backward(model, x, call=call, rounds=1)
    assert counts == {key: 3 * count for key, count in plain.items()}
    assert not pending.deferred  # waiting would unpack twice


def test_save_on_cpu() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = model[0](x)
        return model[1](x)

    model = gpt(16, 2)
    pending = assert_split_equals_backward(model, torch.randn(2, 5, 16, requires_grad=True), call=call)
    assert all(name.startswith("1.") for name in names(model, pending.deferred))
    assert "1.up.weight" in names(model, pending.deferred)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_detect_anomaly() -> None:
    with torch.autograd.detect_anomaly():
        assert_split_equals_backward(gpt(16, 2), torch.randn(2, 5, 16, requires_grad=True))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_detect_anomaly_finds_nan_in_w() -> None:
    layer = nn.Linear(2, 2, bias=False)
    x = torch.tensor([[float("inf"), 1.0]])  # the weight's gradient is 0 · inf
    with torch.autograd.detect_anomaly():
        _, pending = split.backward_input(layer(x), torch.zeros(1, 2))
        with pytest.raises(PendingError, match=r"W must not compute nan .* got nan in the gradient .* shape \(2, 2\)"):
            pending.run()


def test_called_under_no_grad() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    y = layer(x).sum()
    with torch.no_grad():
        grad, pending = split.backward_input(y, None, x)
        pending.run()
    assert not grad.requires_grad
    assert not layer.weight.grad.requires_grad


@pytest.mark.parametrize("where", ["gradient", "I", "I and W"])
def test_inference_mode(where: str) -> None:
    """A gradient that was made there counts no versions; a .grad that was made there could not be added to."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    reference, their_x = twin(model, x)
    with torch.inference_mode():
        grad_output = torch.ones(5, 4)
    for _ in range(2):
        y = model(x)
        with torch.inference_mode(where != "gradient"):
            grad, pending = split.backward_input(y, grad_output, x)
        with torch.inference_mode(where == "I and W"):
            pending.run()
        their_x.grad = None
        reference(their_x).backward(torch.ones(5, 4))
        torch.testing.assert_close(grad, their_x.grad)
        assert_same_grads(model, reference)
