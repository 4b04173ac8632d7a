"""Codecs: never more wrong than they say, exact where they say so, and never near an index."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import gpt
from saved_steps import assert_equal, grads_of, moving
from torch import Tensor, nn
from torch.nn import functional as F

from sternway import saved
from sternway.errors import SavedError
from sternway.saved.policies._codecs import BITS, BLOCK, LOSSY, Codec

INT8, FP8, BF16 = LOSSY["int8"], LOSSY["fp8"], LOSSY["bf16"]


def _round_trip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.nbytes, x.dtype)


def _absmax(x: Tensor) -> Tensor:
    """The largest finite magnitude of each element's block."""
    finite = torch.where(x.isfinite(), x, 0.0).abs()
    padded = F.pad(finite, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: len(x)]


def _bound(codec: Codec, x: Tensor) -> Tensor:
    if codec is INT8:
        return _absmax(x) / 250
    if codec is FP8:
        return torch.maximum(x.abs() / 16, _absmax(x) / (416 * 2**9))
    return x.abs() / 256


@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3 * BLOCK + 5),
    power=st.integers(-60, 60),
    spread=st.floats(0.1, 8),
    seed=st.integers(0, 10_000),
)
def test_the_error_is_within_the_bound(codec: Codec, count: int, power: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(spread).exp()
    x = x * 2.0**power
    error = (_round_trip(codec, x).double() - x.double()).abs()
    assert bool((error <= _bound(codec, x).double() * (1 + 1e-5)).all())


@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_what_is_not_finite_comes_back(codec: Codec) -> None:
    x = torch.randn(2 * BLOCK)
    x[3], x[5], x[7] = torch.inf, -torch.inf, torch.nan
    x[BLOCK:] = -torch.inf
    back = _round_trip(codec, x)
    special = ~x.isfinite()
    torch.testing.assert_close(back[special], x[special], rtol=0, atol=0, equal_nan=True)
    assert bool(((back - x).abs()[~special] <= _bound(codec, x)[~special] * (1 + 1e-5)).all())


@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_zeros_stay_zero(codec: Codec) -> None:
    assert torch.equal(_round_trip(codec, torch.zeros(300)), torch.zeros(300))


class _Convnet(nn.Module):
    """Four blocks of convolution, norm and ReLU, joined as a VGG's, a ResNet's or a DenseNet's are."""

    def __init__(self, joined: str, width: int = 16) -> None:
        super().__init__()
        self.joined = joined
        inputs = [3] + [width * i if joined == "dense" else width for i in range(1, 4)]
        blocks = ((nn.Conv2d(i, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for i in inputs)
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.head = nn.Linear(4 * width if joined == "dense" else width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = y if self.joined == "plain" or index == 0 else x + y if self.joined == "sum" else torch.cat((x, y), 1)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("joined", ["plain", "sum", "dense"])
def test_gradients_through_relu_point_the_same_way(joined: str) -> None:
    """Small positives were rounded to 0, where ReLU's backward reads its mask: the gradients turned, silently."""
    model, x = _Convnet(joined), torch.randn(8, 3, 16, 16)

    def gradient(policy: AbstractContextManager[object]) -> Tensor:
        model.zero_grad()
        with policy:
            loss = F.cross_entropy(model(x), torch.arange(8))
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]

    same = F.cosine_similarity(gradient(saved.compress("int8", min_bytes=0)), gradient(nullcontext()), dim=0)
    assert same > 0.9995


@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
@settings(max_examples=60, deadline=None)
@given(power=st.integers(-60, 60), spread=st.floats(0.1, 8), seed=st.integers(0, 10_000))
def test_signs_and_zeros_are_kept(codec: Codec, power: int, spread: float, seed: int) -> None:
    """A ReLU's backward asks whether what it saved is above zero; a small number must not become none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, generator=generator) * torch.randn(300, generator=generator).mul(spread).exp()
    x = (x * 2.0**power).masked_fill(torch.rand(300, generator=generator) < 0.3, 0)
    assert torch.equal(_round_trip(codec, x).sign(), x.sign())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_the_smallest_numbers_do_not_become_zero(codec: Codec, dtype: torch.dtype) -> None:
    """bfloat16 ends at 2⁻¹³³, float32 at 2⁻¹⁴⁹: what is smaller was rounded to zero."""
    limits = torch.finfo(dtype)
    powers = torch.exp2(torch.linspace(math.log2(limits.tiny * limits.eps), 0, 999, dtype=torch.float64)).to(dtype)
    x = torch.cat([powers, -powers, torch.zeros(50, dtype=dtype)])
    for order in (torch.arange(len(x)), torch.randperm(len(x), generator=torch.Generator().manual_seed(0))):
        assert torch.equal(_round_trip(codec, x[order]).sign(), x[order].sign())


def test_the_gradient_of_a_relu_is_exact() -> None:
    x = (torch.randn(4096) * torch.randn(4096).mul(3).exp()).requires_grad_()
    with saved.compress("int8", min_bytes=0) as report:
        y = (x * 1).relu()
    y.backward(torch.ones(4096))
    assert report.ratio > 3
    assert torch.equal(x.grad, (x > 0).float())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    x = torch.randn(500).to(dtype)
    for codec in (INT8, FP8):
        assert codec.suits(x)
        back = _round_trip(codec, x)
        assert back.dtype == dtype
        rounding = x.double().abs() / (128 if dtype == torch.bfloat16 else 1024)
        assert bool(((back.double() - x.double()).abs() <= _bound(codec, x.double()) * 1.001 + rounding).all())


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_booleans_take_a_bit(values: list[bool]) -> None:
    x = torch.tensor(values)
    assert BITS.suits(x)
    payload = BITS.encode(x)
    assert payload.numel() == 8 + -(-len(values) // 8)
    assert torch.equal(_round_trip(BITS, x), x)


def test_a_dropout_mask_takes_a_bit_too_and_is_exact() -> None:
    mask = F.dropout(torch.ones(1000), 0.3)
    assert BITS.suits(mask)
    assert torch.equal(_round_trip(BITS, mask), mask)
    assert not BITS.suits(torch.randn(1000).relu())
    assert not BITS.suits(-mask)
    x = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(0)
    with saved.compress("int8", min_bytes=0) as report:
        y = F.dropout(x, 0.3).sum()
    y.backward()
    assert report.ratio > 30
    torch.manual_seed(0)
    assert torch.equal(x.grad, F.dropout(torch.ones(64, 64), 0.3))  # type: ignore[arg-type]


def test_indices_are_never_touched() -> None:
    x = torch.randn(100, 32, requires_grad=True)

    def use(x: Tensor) -> Tensor:
        rows = torch.randint(0, 100, (5000,))
        pooled = F.max_pool1d(x[None], 2)[0]
        return x[rows].sum() + x.gather(0, rows[:3200].view(100, 32)).sum() + pooled.sum() + x.topk(3).values.sum()

    torch.manual_seed(0)
    use(x).backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(0)
    with saved.compress("int8", min_bytes=0) as report:
        loss = use(x)
    loss.backward()
    assert report.skipped["incompressible"] > 5000 * 8
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_per_module() -> None:
    model, x = gpt(64, 2), torch.randn(2, 16, 64)
    with saved.compress("bf16", min_bytes=0), saved.compress("int8", where="1.*", min_bytes=0) as report:
        loss = model(x).sum()
    loss.backward()
    rows = {row.module: row for row in report.modules}
    assert rows["0.up"].ratio == 2
    assert 3.5 < rows["1.up"].ratio < 4
    with saved.compress("int8", where="nowhere", min_bytes=0) as report:
        model(x)
    assert report.ratio == 1
    assert report.skipped["elsewhere"] > 0


def test_gradients_are_near_and_composition_is_one_with() -> None:
    model, x = gpt(64, 2), torch.randn(2, 16, 64)
    expected = grads_of(model, x)
    alone = grads_of(model, x, saved.compress("int8", min_bytes=0))
    policy = moving(window=0)
    with policy as report, saved.compress("int8", min_bytes=0):
        moved = grads_of(model, x)
    assert_equal(moved, alone)  # encoded, then moved: the same bytes come back
    assert report.moved_bytes == report.total.encoded_to < report.total.encoded_from / 3.5
    with saved.compress("int8", min_bytes=0), moving(window=0):
        assert_equal(grads_of(model, x), alone)  # in either order
    for mine, theirs in zip(alone, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine - theirs).norm() < 0.05 * theirs.norm()


def test_small_tensors_stay_exact() -> None:
    x = torch.randn(100, requires_grad=True)
    with saved.compress("int8") as report:
        y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
    assert report.skipped == {"small": 400}


def test_double_backward_under_a_codec() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with saved.compress("bf16", min_bytes=0):
        y = (x.sin() * x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 2 * x.cos() - x * x.sin(), rtol=0.05, atol=0.05)


def test_mistakes() -> None:
    with pytest.raises(SavedError, match=r"codec must be the name of a codec; got 'zip'\. Fix: pass bf16, fp8, int8"):
        saved.compress("zip")
    with (
        pytest.raises(SavedError, match="needs a policy that moves tensors to a disk"),
        saved.compress("lossless", min_bytes=0),
    ):
        nn.Linear(4, 4)(torch.randn(2, 4, requires_grad=True)).exp()
