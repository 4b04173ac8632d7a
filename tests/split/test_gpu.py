"""The split on a real GPU."""

from __future__ import annotations

import pytest
import torch
from models import convnet, gpt, llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compare import assert_split_equals_backward, names
from sternway import split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context; cuDNN, that weights were copied
]


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: gpt(64, 2), (2, 16, 64)), (lambda: llama(64, 2), (2, 16, 64)), (lambda: convnet(16, 2), (2, 3, 16, 16))],
    ids=["gpt", "llama", "convnet"],
)
def test_split_equals_backward(make, shape: tuple[int, ...], first_stage: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", requires_grad=not first_stage)
    pending = assert_split_equals_backward(make().cuda(), x, rtol=1e-3, atol=1e-3)
    assert pending.deferred


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, device="cuda", dtype=dtype, requires_grad=True)
    assert_split_equals_backward(gpt(64, 2).cuda().to(dtype), x, rtol=5e-2, atol=5e-2)


def test_autocast() -> None:
    torch.manual_seed(0)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x)

    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    pending = assert_split_equals_backward(gpt(64, 2).cuda(), x, call=call, rtol=5e-2, atol=5e-2)
    assert len(pending.deferred) == 16


def test_checkpoint() -> None:
    torch.manual_seed(0)
    runs = 0

    def call(model: nn.Module, x: Tensor) -> Tensor:
        def block(layer: nn.Module, x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return layer(x)

        for layer in model:
            x = checkpoint(block, layer, x, use_reentrant=False)
        return x

    model = gpt(64, 2).cuda()
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    pending = assert_split_equals_backward(model, x, call=call, rounds=1, rtol=1e-3, atol=1e-3)
    assert runs == 8  # two blocks, forward and once more, for us and for the reference
    assert {"0.up.weight", "1.qkv.weight"} <= names(model, pending.deferred)


def test_recurrent_layers_are_one_node_and_computed_in_i() -> None:
    layer = nn.LSTM(8, 8, batch_first=True).cuda()
    x = torch.randn(2, 5, 8, device="cuda", requires_grad=True)
    pending = assert_split_equals_backward(layer, x, call=lambda m, x: m(x)[0], rtol=1e-3, atol=1e-3)
    assert len(pending.ready) == 4


def _requested() -> int:
    """Bytes in use as they were asked for: what is allocated is rounded up, by up to a mebibyte for each block."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_memory_after_i_and_after_w() -> None:
    model = gpt(256, 4).cuda().bfloat16()
    x = torch.randn(4, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    split.backward_input(model(x).sum(), None, x)[1].run()
    arriving = torch.ones_like(x)
    start = _requested()
    y = model(x)
    after_f = _requested() - start
    grad, pending = split.backward_input(y, arriving, x)
    del y, grad
    after_i = _requested() - start
    assert after_i <= after_f
    # The arriving gradient and the input are held too, and were there before.
    assert pending.nbytes == pytest.approx(after_i + arriving.nbytes + x.nbytes, rel=0.05)
    pending.run()
    del pending
    assert _requested() == start


def test_on_a_stream_of_its_own() -> None:
    model = gpt(64, 2).cuda()
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_split_equals_backward(model, x, rtol=1e-3, atol=1e-3)
    torch.cuda.current_stream().wait_stream(stream)


def test_gradients_that_are_summed_more_than_once() -> None:
    """One call for all sums, with the same place in it twice, raced on a GPU."""
    layer = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    assert_split_equals_backward(layer, x, call=lambda m, x: m(m(m(x))), rounds=3, rtol=1e-3, atol=1e-3)


def test_a_weight_kept_on_the_cpu() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    assert_split_equals_backward(
        layer, x, call=lambda m, x: nn.functional.linear(x, m.weight.cuda(), m.bias.cuda()), rtol=1e-3, atol=1e-3
    )
