"""What the tests of the saved room share: a step under a policy, and policies that move on a CPU too."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sternway.saved import Offload
from sternway.saved._offloader import Offloader
from sternway.saved.stores._host import HostStore
from sternway.saved.stores._store import Store

LARGE = 2**40


def moving(
    budget: float | str = 0, prefetch: int = LARGE, window: int = LARGE, store: Store | None = None, **options: Any
) -> Offload:
    """An offload policy that moves CPU tensors too, through the host's pool: the code that runs on a GPU."""
    offloader = Offloader(store or HostStore(LARGE, pinned=False), budget, prefetch, window)
    return Offload(offloader, anywhere=True, **options)


def grads_of(model: nn.Module, x: Tensor, *policies: AbstractContextManager[Any]) -> list[Tensor | None]:
    """Every gradient of one step, the input's first, from the same random numbers each time."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    with ExitStack() as stack:
        for policy in policies:
            stack.enter_context(policy)
        out = model(x)
        loss = (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum()
    loss.backward()
    return [x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    assert len(ours) == len(theirs)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), f"gradient {index}"
        if mine is not None and other is not None:
            assert torch.equal(mine, other), f"gradient {index}: {(mine - other).abs().max()}"
