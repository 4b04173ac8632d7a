"""On CUDA, the bytes are the allocator's."""

from __future__ import annotations

import pytest
import torch
from models import convnet, gpt, llama
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from sternway import graph
from sternway.cli._gpt import GPT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = {
    "gpt": (lambda: gpt(512, 4, heads=8), (4, 256, 512)),
    "llama": (lambda: llama(512, 4, heads=8), (4, 256, 512)),
    "convnet": (lambda: convnet(64, 4), (16, 3, 64, 64)),
}


def _growth(model: nn.Module, x: torch.Tensor, call: object = None) -> tuple[int, graph.Graph]:
    forward = call or (lambda: model(x))
    for _ in range(2):  # kernels' workspaces are allocated once
        forward().sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = forward().sum()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    return after - before, graph.capture(loss, model)


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_agree_with_the_allocator(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, x = make().cuda(), torch.randn(shape, device="cuda")
    grown, captured = _growth(model, x)
    ours = captured.by_device()["cuda:0"]
    # The batch was there before, and is kept too.
    ours -= sum(
        {
            k.saved.storage: k.saved.storage_nbytes
            for k in captured.saved
            if k.saved.nbytes == x.nbytes and k.saved.storage == _storage_of_input(captured, x)
        }.values()
    )
    assert abs(grown - ours) <= 0.02 * grown, (grown, ours)


def _storage_of_input(captured: graph.Graph, x: torch.Tensor) -> int | None:
    """The storage that the first operation keeps of the batch, if it keeps it itself."""
    first = next((k for k in captured.saved if k.saved.nbytes == x.nbytes and k.saved.role == "activation"), None)
    if first is None or any(first.node.next[i] for i in range(min(1, len(first.node.next)))):
        return None
    return first.saved.storage


def test_a_gpt_from_tokens_to_loss() -> None:
    model = GPT(vocabulary=1000, dim=512, heads=8, layers=6, length=256).cuda()
    tokens = torch.randint(0, 1000, (4, 256), device="cuda")

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    grown, captured = _growth(model, tokens, loss)
    assert abs(grown - captured.by_device()["cuda:0"]) <= 0.02 * grown


def test_checkpointed() -> None:
    model = gpt(512, 8, heads=8).cuda()
    x = torch.randn(4, 256, 512, device="cuda", requires_grad=True)

    def forward() -> torch.Tensor:
        return checkpoint_sequential(model, 4, x, use_reentrant=False)

    grown, captured = _growth(model, x, forward)
    ours = captured.by_device()["cuda:0"] - x.nbytes  # the batch was there before
    assert abs(grown - ours) <= 0.02 * grown + 2 * x.nbytes // 100, (grown, ours)


def test_offloaded_bytes_are_on_the_cpu() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = x.exp().sum()
    assert graph.capture(loss).by_device() == {"cpu": 4000}
