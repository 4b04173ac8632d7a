"""The order in which hooks run: in each half it is the engine's; all of I comes before all of W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sternway import split


def _hooked(log: list[str]) -> Tensor:
    """A loss, with hooks of every kind on every node, tensor and module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
    for name, module in model.named_children():
        module.register_full_backward_hook(lambda *_, name=name: log.append(f"module {name}"))
        module.register_full_backward_pre_hook(lambda *_, name=name: log.append(f"before module {name}"))
    x = torch.randn(5, 4, requires_grad=True)
    middle = x * 2
    middle.register_hook(lambda grad: log.append("tensor middle"))
    loss = model(middle).sum()
    stack, seen = [loss.grad_fn], set[Any]()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = f"{'leaf ' if hasattr(node, 'variable') else ''}{node.name()} {len(seen)}"
        node.register_prehook(lambda *_, name=name: log.append(f"{name} before"))
        node.register_hook(lambda *_, name=name: log.append(f"{name} after"))
        stack += [child for child, _ in node.next_functions]
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: log.append(f"leaf {name} tensor"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(f"leaf {name} accumulated"))
    return loss


def test_each_half_in_the_order_of_a_plain_backward() -> None:
    theirs: list[str] = []
    _hooked(theirs).backward()
    ours: list[str] = []
    _, pending = split.backward_input(_hooked(ours))  # the input is a leaf like the parameters
    in_i = len(ours)
    pending.run()

    def of_leaves(entry: str) -> bool:
        return entry.startswith("leaf ")

    assert sorted(ours) == sorted(theirs)
    assert not any(of_leaves(entry) for entry in ours[:in_i])
    assert ours[:in_i] == [entry for entry in theirs if not of_leaves(entry)]
    assert all(of_leaves(entry) for entry in ours[in_i:])
    assert _groups(ours[in_i:]) == _groups([entry for entry in theirs if of_leaves(entry)])


def _groups(entries: list[str]) -> set[tuple[str, ...]]:
    """What runs at each leaf, in order: until the hook after its node."""
    groups, group = set(), list[str]()
    for entry in entries:
        group.append(entry)
        if entry.endswith(" after"):
            groups.add(tuple(group))
            group = []
    assert len(groups) == 7  # six parameters, and the input
    return groups


def test_the_node_that_runs_is_known_to_its_hooks() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    current: Callable[[], Any] = torch._C._current_autograd_node
    y = layer(x).tanh()
    nodes: list[Any] = []
    node: Any = y.grad_fn
    node.register_prehook(lambda grads: nodes.append(current()))
    layer.weight.register_hook(lambda grad: nodes.append(current()))
    leaf = get_gradient_edge(layer.weight).node
    _, pending = split.backward_input(y, torch.ones_like(y), x)
    assert [each is node for each in nodes] == [True]
    pending.run()
    assert nodes[1] is leaf


def test_an_edge_holds_the_graph_by_itself() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = layer(x)
    edge = get_gradient_edge(y)
    del y
    grad, pending = split.backward_input(edge, torch.ones(5, 4), x)
    del edge
    pending.run()
    torch.testing.assert_close(grad, expected)
    assert layer.weight.grad is not None
