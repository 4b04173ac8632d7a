"""Saved tensors on a real GPU: side streams, page-locked buffers, the allocator's own figures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from models import MODELS, gpt
from saved_steps import assert_equal, grads_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from sternway import saved
from sternway.saved import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context; cuDNN, that weights were copied
]

POLICIES: dict[str, Callable[[Path], Policy]] = {
    "everything": lambda _: saved.offload(min_bytes=0),
    "no prefetch": lambda _: saved.offload(min_bytes=0, prefetch=0),
    "small windows": lambda _: saved.offload(min_bytes=0, buffer=1000, prefetch=5000),
    "half": lambda _: saved.offload(min_bytes=0, budget=0.5),
    "bytes": lambda _: saved.offload(min_bytes=0, budget=20000),
    "auto": lambda _: saved.offload(min_bytes=0, budget="auto"),
    "disk": lambda path: saved.offload(to="disk", directory=path, min_bytes=0),
    "mutable": lambda _: saved.mutable(),
    "keep": lambda _: saved.keep(),
}


@pytest.fixture(autouse=True)
def _the_same_kernels_each_time() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_keeping(name: str, policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().cuda(), torch.randn(shape, device="cuda")
    expected, again = grads_of(model, x), grads_of(model, x)
    under = POLICIES[policy](tmp_path)
    exact = all(a is None or torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    for _ in range(4):
        found = grads_of(model, x, under)
        if exact:
            assert_equal(found, expected)
        else:  # a kernel that adds in any order: no two runs agree to the bit, whatever is kept
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def _blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = gpt(256, 4).cuda().bfloat16()
    return model, torch.randn(4, 512, 256, device="cuda", dtype=torch.bfloat16)


def _held(model: nn.Module, x: Tensor, *policies: Policy) -> int:
    """Bytes that a forward leaves allocated, above what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    if policies:
        with policies[0]:
            loss = model(x).sum()
    else:
        loss = model(x).sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


def test_less_is_held_and_weights_stay() -> None:
    model, x = _blocks()
    for _ in range(2):
        kept = _held(model, x)
    policy = saved.offload(min_bytes=0, buffer=0)
    for _ in range(2):
        held = _held(model, x, policy)
    assert held < 0.1 * kept
    with policy as report:
        loss = model(x).sum()
    loss.backward()
    assert report.skipped["parameter"] >= sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    weights = {p.untyped_storage().nbytes() for p in model.parameters()}
    assert report.moved_bytes + report.skipped["parameter"] == report.packed_bytes
    assert report.deduplicated_bytes > 0
    assert weights


def test_two_hundred_steps_leave_nothing_behind() -> None:
    model, x = _blocks()
    policy = saved.offload(min_bytes=0)
    sizes = []
    for step in range(200):
        with policy:
            loss = model(x).float().square().mean()
        loss.backward()
        del loss
        if step % 20 == 19:
            torch.cuda.synchronize()
            torch.empty(1, device="cuda")  # lets the allocator look at what has come free
            sizes.append((torch.cuda.memory_allocated(), policy.offloader.store.pool.free_bytes))
    assert len(set(sizes[1:])) == 1, sizes
    assert policy.offloader.store.pool.taken_bytes == 0


def test_a_graph_that_is_dropped_frees_its_buffers() -> None:
    model, x = _blocks()
    policy = saved.offload(min_bytes=0)
    before = None
    for _ in range(3):
        with policy:
            loss = model(x).sum()
        del loss
        gc.collect()
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # lets the allocator look at what has come free
        now = torch.cuda.memory_allocated()
        assert policy.offloader.store.pool.taken_bytes == 0
        assert before is None or now == before
        before = now


def test_on_a_stream_of_its_own() -> None:
    model, x = _blocks()
    expected = grads_of(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    policy = saved.offload(min_bytes=0, buffer="1MiB", prefetch="1MiB")
    with torch.cuda.stream(stream):
        for _ in range(3):
            found = grads_of(model, x, policy)
    torch.cuda.current_stream().wait_stream(stream)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_change_in_place_is_seen_or_copied() -> None:
    def run(*policies: Policy) -> Tensor:
        x = torch.full((2**20,), 0.5, device="cuda", requires_grad=True)
        with policies[0], policies[-1]:
            y = x * 2
            loss = (y**2).sum()
            y.zero_()
        loss.backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(saved.offload(budget="1GiB"))
    assert torch.equal(run(saved.offload(), saved.mutable()), torch.full((2**20,), 4.0, device="cuda"))


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
def test_compress_then_offload(codec: str) -> None:
    model, x = _blocks()
    model, x = model.float(), x.float()
    expected = grads_of(model, x, saved.compress(codec))
    with saved.offload(min_bytes=0), saved.compress(codec) as report:
        found = grads_of(model, x)
    assert report.ratio > 1.5
    assert_equal(found, expected)  # moving the encoded bytes changes none of them


def test_checkpoints_keep_their_inputs_away() -> None:
    model, x = _blocks()

    def loss_of() -> Tensor:
        h = x
        for block in model:
            h = checkpoint(block, h, use_reentrant=False)
        return h.float().square().mean()

    model.zero_grad()
    loss_of().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with saved.offload(min_bytes=0) as report:
        loss = loss_of()
    loss.backward()
    assert report.moved_bytes >= 3 * x.nbytes
    for p, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, theirs)


def test_an_error_leaves_no_buffer_behind() -> None:
    model, x = _blocks()
    policy = saved.offload(min_bytes=0)
    with pytest.raises(ZeroDivisionError), policy:  # noqa: PT012 - the forward is what fails
        model(x)
        raise ZeroDivisionError
    gc.collect()
    torch.cuda.synchronize()
    with policy:
        pass
    assert policy.offloader.store.pool.taken_bytes == 0


def test_auto_learns_and_moves() -> None:
    model, x = _blocks()
    policy = saved.offload(budget="auto", min_bytes=0)
    for _ in range(4):
        with policy as report:
            loss = model(x).sum()
        loss.backward()
    assert policy.offloader.plan is not None
    assert report.moved_bytes + report.kept_bytes + sum(report.skipped.values()) == report.packed_bytes
    assert report.stall_seconds >= 0
