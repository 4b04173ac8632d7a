"""DDP and FSDP2 around the module, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import gpt
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from compare import assert_same_grads
from gloo import on_ranks
from sternway import split
from sternway.errors import SplitError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return gpt(8, 2, heads=2)


def _ddp(rank: int, options: dict[str, object], hooked: bool) -> None:
    ours, reference = DistributedDataParallel(_model(), **options), DistributedDataParallel(_model(), **options)
    fired: list[int] = []
    if hooked:
        ours.module[0].up.weight.register_hook(lambda grad: fired.append(rank))
    torch.manual_seed(rank)
    for _ in range(2):
        x = torch.randn(2, 4, 8, requires_grad=True)
        their_x = x.detach().clone().requires_grad_()
        reference(their_x).square().sum().backward()
        grad, pending = split.backward_input(ours(x).square().sum(), None, x)
        torch.testing.assert_close(grad, their_x.grad)
        pending.run()
        assert_same_grads(ours.module, reference.module, rtol=1e-4, atol=1e-5)
    with ours.no_sync(), reference.no_sync():
        x = torch.randn(2, 4, 8)
        reference(x).square().sum().backward()
        split.backward_input(ours(x).square().sum())[1].run()
        assert_same_grads(ours.module, reference.module, rtol=1e-4, atol=1e-5)
    x = torch.randn(2, 4, 8)
    reference(x).square().sum().backward()
    split.backward_input(ours(x).square().sum())[1].run()
    assert_same_grads(ours.module, reference.module, rtol=1e-4, atol=1e-5)
    everywhere = [torch.empty_like(ours.module[1].up.weight.grad) for _ in range(2)]
    dist.all_gather(everywhere, ours.module[1].up.weight.grad)
    torch.testing.assert_close(*everywhere)
    assert len(fired) == 4 * hooked


@pytest.mark.parametrize("hooked", [False, True], ids=["no hooks", "a hook"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_ddp_reduces_as_with_a_plain_backward(options: dict[str, object], hooked: bool) -> None:
    on_ranks(2, _ddp, options, hooked)


def _static_graph(rank: int) -> None:
    model = DistributedDataParallel(_model(), static_graph=True)
    with pytest.raises(SplitError, match=r"got DistributedDataParallel\(..., static_graph=True\). Fix: leave"):
        split.backward_input(model(torch.randn(2, 4, 8)).sum())


def test_ddp_with_a_static_graph_is_refused() -> None:
    on_ranks(2, _static_graph)


def _fsdp(rank: int) -> None:
    for needs_grad, by_block in ((True, True), (True, False), (False, True), (False, False)):
        model = _model()
        for block in model if by_block else ():
            fully_shard(block)
        fully_shard(model)
        y = model(torch.randn(2, 4, 8, requires_grad=needs_grad))
        with pytest.raises(SplitError, match="FSDP must not reduce or reshard at the end of I"):
            split.backward_input(y.square().sum())


def test_fsdp2_is_refused_where_its_reduction_would_come_before_w() -> None:
    on_ranks(2, _fsdp)
