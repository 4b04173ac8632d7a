"""On CUDA, the bytes are the allocator's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import convnet, gpt, llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from sternway import graph
from sternway.demo import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


def _assert_within_two_percent(model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
    """``loss_of`` makes its own batch, so that the allocator's growth counts the batch as the graph does."""
    for _ in range(2):  # kernels' workspaces are allocated once
        loss_of().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = loss_of()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    kept = graph.capture(loss, model).by_device()["cuda:0"]
    assert abs(grown - kept) <= 0.02 * grown, f"the allocator grew by {grown}, the graph keeps {kept}"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: gpt(512, 4, heads=8), (4, 256, 512)),
        (lambda: llama(512, 4, heads=8), (4, 256, 512)),
        (lambda: convnet(64, 4), (16, 3, 64, 64)),
    ],
    ids=["gpt", "llama", "convnet"],
)
def test_saved_bytes_agree_with_the_allocator(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make().cuda()
    _assert_within_two_percent(model, lambda: model(torch.randn(shape, device="cuda")).sum())


def test_a_gpt_from_tokens_to_loss() -> None:
    model = GPT(vocabulary=1000, dim=512, heads=8, layers=6, length=256).cuda()

    def loss() -> Tensor:
        tokens = torch.randint(0, 1000, (4, 256), device="cuda")
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    _assert_within_two_percent(model, loss)


def test_checkpointed() -> None:
    model = gpt(512, 8, heads=8).cuda()

    def loss() -> Tensor:
        x = torch.randn(4, 256, 512, device="cuda", requires_grad=True)
        return checkpoint_sequential(model, 4, x, use_reentrant=False).sum()

    _assert_within_two_percent(model, loss)


def test_offloaded_bytes_are_on_the_cpu() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = x.exp().sum()
    assert graph.capture(loss).by_device() == {"cpu": 4000}
