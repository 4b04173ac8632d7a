"""What the split says it would do is what it does; asking changes nothing."""

from __future__ import annotations

import pytest
import torch
from models import gpt
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, twin
from compiled import compiled
from sternway import split
from sternway.errors import SplitError


def test_it_says_what_backward_input_does() -> None:
    model, x = gpt(8, 2, heads=2), torch.randn(2, 3, 8, requires_grad=True)
    y = model(x)
    seen = split.preview(y, x)
    _, pending = split.backward_input(y.sum(), None, x)
    deferred = {leaf.variable for each in seen.deferred for leaf in each.leaves}
    assert deferred == set(pending.deferred)
    assert {leaf.variable for leaf in seen.ready} == set(pending.ready)


def test_asking_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    reference, their_x = twin(model, x)
    y = model(x).square().sum()
    split.preview(y, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    y.backward()
    reference(their_x).square().sum().backward()
    assert_same_grads(model, reference)


def test_edges_and_nesting() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    y = layer(x)
    (each,) = split.preview({"y": get_gradient_edge(y)}, [get_gradient_edge(x), None]).deferred
    assert each.node is y.grad_fn
    assert {leaf.variable for leaf in each.leaves} == set(layer.parameters())


def test_leaves_of_a_compiled_graph_count_as_ready() -> None:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    seen = split.preview(compiled(layer)(torch.randn(3, 4)))
    assert seen.deferred == ()
    assert {leaf.variable for leaf in seen.ready} == set(layer.parameters())


def test_what_cannot_be_split_is_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(SplitError, match="reentrant checkpointing cannot be split"):
        split.preview(checkpoint(layer, x, use_reentrant=True), x)
    with pytest.raises(SplitError, match="outputs must be nested in tuples"):
        split.preview({layer(x)}, x)
