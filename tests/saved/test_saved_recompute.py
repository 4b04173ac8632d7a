"""What a selective checkpoint keeps is as it was computed, however it is changed afterwards.

torch counts writes by tensor. A product's result is often seen through a view that has a count of its own, so that a
change in place was not noticed: the kept result was taken as it was afterwards, and gradients were wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from saved_steps import moving
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sternway import saved
from sternway._torch.memory import counts_operations

DIM = 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.scale, self.recurrent = nn.Parameter(torch.rand(DIM)), nn.GRU(DIM, DIM, batch_first=True)


def in_place(model: Layers, x: Tensor) -> Any:
    return model.first(x).add_(1).sin()


def by_product(model: Layers, x: Tensor) -> Any:
    return (x @ model.last.weight).clamp_(-1, 1).exp()


def in_parts(model: Layers, x: Tensor) -> Any:
    one, two, three = torch.unsafe_chunk(model.first(x), 3, -1)
    return one.sigmoid_() * two.tanh_() + three.exp()


def recurrent(model: Layers, x: Tensor) -> Any:
    return model.recurrent(x)[0]


def past_autograd(model: Layers, x: Tensor) -> Any:
    y = model.last(x)
    y.data.mul_(2)
    return y.sin()


def into_memory(model: Layers, x: Tensor) -> Any:
    memory = torch.zeros(len(x) * x.shape[1], DIM)
    torch.mm(x.detach().flatten(0, 1), model.last.weight.detach(), out=memory)
    return memory * model.scale


def outside(model: Layers, x: Tensor) -> Any:
    y = model.last(x)
    return y, torch.sin(y.clone()) * model.scale


def is_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return counts_operations(operator)


KINDS = [in_place, by_product, in_parts, recurrent, past_autograd, into_memory, outside]


POLICIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "moved": moving,
    "a budget for all": lambda: moving(budget=10_000),
    "mutable": saved.mutable,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_as_it_was(kind: Callable[[Layers, Tensor], Any], policy: str) -> None:
    found = []
    for again in (False, True):
        model, x = Layers(), torch.linspace(-1, 1, 6 * DIM).view(2, 3, DIM).requires_grad_()
        if again:
            with POLICIES[policy]():
                result = checkpoint(kind, model, x, use_reentrant=False, context_fn=saved.recompute(is_kept))
        else:
            result = kind(model, x)
        if isinstance(result, tuple):  # changed after the region
            result = result[0].mul_(3) + result[1]
        result.square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)
