"""Hooks that Python cannot read back off the graph, and other places where a split could differ without a word.

Each case is built twice from the same seed: once with a plain backward, once in two halves. Gradients of parameters and
inputs, and what the hooks saw and how often, must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sternway import split
from sternway.split._unseen import UNSEEN

Log = list[Any]


class Case(NamedTuple):
    """A forward that was run: what gradient starts from, where the split stops, and who gets ``.grad``."""

    loss: Tensor
    inputs: list[Tensor]
    leaves: list[Tensor]


def assert_equal(build: Callable[[Log], Case], rounds: int = 1) -> None:
    logs: tuple[Log, Log] = ([], [])
    torch.manual_seed(0)
    theirs = build(logs[0])
    theirs.loss.backward()
    torch.manual_seed(0)
    ours = build(logs[1])
    grads, pending = split.backward_input(ours.loss, None, ours.inputs)
    pending.run()
    for mine, their in zip(grads, theirs.inputs, strict=True):
        assert (mine is None) == (their.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, their.grad)
    for mine, their in zip(ours.leaves, theirs.leaves, strict=True):
        assert (mine.grad is None) == (their.grad is None)
        torch.testing.assert_close(mine.grad, their.grad)
    assert len(logs[1]) == len(logs[0])
    for mine, their in zip(sorted(logs[1], key=str), sorted(logs[0], key=str), strict=True):
        torch.testing.assert_close(mine, their)


def seen(log: Log, factor: float) -> Callable[[Tensor], Tensor]:
    """A hook that notes what it sees and changes it."""

    def hook(grad: Tensor) -> Tensor:
        log.append(grad.double().sum())
        return grad * factor

    return hook


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda w: w.t(),
    "swapped": lambda w: w.transpose(0, 1),
    "cast": lambda w: w.to(torch.float64),
    "view": lambda w: w.view(4, 4),
    "transposed cast": lambda w: w.t().to(torch.float64),
}


@pytest.mark.parametrize("filled", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_hook_between_a_parameter_and_its_product(between: str, needs: bool, filled: bool) -> None:
    def build(log: Log) -> Case:
        weight = torch.randn(4, 4, requires_grad=True)
        made = BETWEEN[between](weight)
        x = torch.randn(3, 4, dtype=made.dtype, requires_grad=needs)
        if filled:
            weight.grad = torch.ones(4, 4)
        made.register_hook(seen(log, 2.0))
        return Case((x @ made).square().sum(), [x], [weight])

    assert_equal(build)


def test_a_hook_on_an_embeddings_cast_weight() -> None:
    def build(log: Log) -> Case:
        weight = torch.randn(5, 4, requires_grad=True)
        table = weight.to(torch.float64)
        table.register_hook(seen(log, 3.0))
        return Case(F.embedding(torch.tensor([0, 2, 2]), table).square().sum(), [], [weight])

    assert_equal(build)


def _nodes(loss: Tensor) -> dict[str, Any]:
    """By kind, the nodes behind a loss."""
    found, stack = {}, [loss.grad_fn]
    while stack:
        node = stack.pop()
        found.setdefault(type(node).__name__, node)
        stack += [child for child, _ in node.next_functions if child is not None]
    return found


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
@pytest.mark.parametrize("retained", [False, True], ids=["hooked", "retained"])
def test_a_hook_on_what_a_product_made(needs: bool, retained: bool) -> None:
    def build(log: Log) -> Case:
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=needs)
        y = layer(x)
        y.retain_grad() if retained else y.register_hook(seen(log, 2.0))
        return Case(y.square().sum(), [x], [*layer.parameters(), *([y] if retained else [])])

    assert_equal(build)


@pytest.mark.parametrize("filled", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("place", "bias"),
    [("MmBackward0", False), ("AddmmBackward0", True), ("TBackward0", True), ("AccumulateGrad", False)],
    ids=["mm", "addmm", "t", "accumulate"],
)
def test_a_hook_on_a_node(place: str, bias: bool, when: str, needs: bool, filled: bool) -> None:
    def build(log: Log) -> Case:
        layer = nn.Linear(4, 4, bias=bias)
        x = torch.randn(3, 4, requires_grad=needs)
        if filled:
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
        loss = layer(x).square().sum()
        node = _nodes(loss)[place]
        if place == "AccumulateGrad":  # of the weight, whichever comes first
            node = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
        if when == "before":
            node.register_prehook(lambda grads: tuple(g if g is None else 2 * g for g in note(log, grads)))
        else:
            keep(layer, node.register_hook(lambda ins, outs: change(log, ins, outs)))
        keep(layer, node)
        return Case(loss, [x], list(layer.parameters()))

    def note(log: Log, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        log.extend(g.sum() for g in grads if g is not None)
        return grads

    def change(log: Log, ins: Any, outs: Any) -> Any:
        note(log, outs)
        return tuple(g if g is None else 2 * g for g in note(log, ins)) if ins else None

    def keep(layer: nn.Module, what: Any) -> None:
        layer.__dict__.setdefault("kept", []).append(what)

    assert_equal(build)


def test_node_hooks_that_were_there_before_an_earlier_split() -> None:
    """Two graphs are made, hooks put on both; splitting the first must not make those of the second forgotten."""

    def build(log: Log) -> Case:
        layer = nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        first, second = layer(x).sum(), layer(2 * x).square().sum()
        for loss in (first, second):
            _nodes(loss)["TBackward0"].register_prehook(lambda grads: (2 * grads[0],))
        return Case(first + second, [x], list(layer.parameters()))

    assert_equal(build)
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    first, second = layer(x).sum(), layer(2 * x).square().sum()
    for loss in (first, second):
        _nodes(loss)["TBackward0"].register_prehook(lambda grads: (2 * grads[0],))
    split.backward_input(first)[1].run()
    layer.weight.grad = None
    split.backward_input(second)[1].run()
    (expected,) = torch.autograd.grad(layer(2 * x).square().sum(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, 2 * expected)


def test_a_hook_on_accumulate_grad_stays_for_later_graphs() -> None:
    def build(log: Log) -> Case:
        layer = nn.Linear(4, 4)
        node = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: (seen(log, 2.0)(grads[0]),))
        layer.kept = node
        for _ in range(2):  # splits of other graphs meanwhile
            other = nn.Linear(4, 4)
            split.backward_input(other(torch.ones(2, 4)).sum())[1].run()
        return Case(layer(torch.randn(3, 4)).square().sum(), [], list(layer.parameters()))

    assert_equal(build)


@pytest.mark.parametrize("kind", [nn.LayerNorm, lambda n: nn.Linear(n, n)], ids=["norm", "linear"])
def test_a_hook_put_on_a_parameter_while_a_checkpoint_recomputes(kind: Callable[[int], nn.Module]) -> None:
    def build(log: Log) -> Case:
        layer, calls = kind(4), []

        def run(x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 2:  # the recomputation
                layer.weight.register_hook(seen(log, -2.0))
            return layer(x)

        x = torch.randn(3, 4, requires_grad=True)
        return Case(checkpoint(run, x, use_reentrant=False).square().sum(), [x], list(layer.parameters()))

    assert_equal(build)


@pytest.mark.parametrize("n", [1, 2], ids=["alone", "with another"])
def test_a_hook_on_a_parameter_that_is_an_output(n: int) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(n)]
    log: Log = []
    for parameter in parameters:
        parameter.register_hook(seen(log, 2.0))
    _, pending = split.backward_input(parameters, [torch.ones(3)] * n)
    assert not log
    pending.run()
    assert log == [3.0] * n
    assert [parameter.grad.tolist() for parameter in parameters] == [[2.0] * 3] * n


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_a_hook_on_several_tensors_under_a_checkpoint(needs: bool) -> None:
    def build(log: Log) -> Case:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        x = torch.randn(3, 4, requires_grad=needs)
        register_multi_grad_hook(
            list(model.parameters()), lambda grads: log.append(torch.stack([g.sum() for g in grads if g is not None]))
        )
        y = checkpoint(model, x, use_reentrant=False)
        return Case(y.square().sum(), [x], list(model.parameters()))

    assert_equal(build)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_a_hook_on_several_tensors_some_of_which_are_sliced_or_derived(needs: bool, recomputed: bool) -> None:
    def build(log: Log) -> Case:
        weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(4)]
        norm, x = nn.LayerNorm(4).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=needs)
        leaves = [*weights, *norm.parameters()]

        def run(x: Tensor) -> Tensor:
            y = norm(x @ weights[0].t()) @ weights[1][:, :4]
            return y @ (weights[2] + weights[3] @ weights[3]) @ weights[3]

        register_multi_grad_hook(leaves, lambda grads: log.append(torch.stack([g.sum() for g in grads])))
        y = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
        return Case(y.square().sum(), [x], leaves)

    assert_equal(build)


@pytest.mark.parametrize("above", [Tensor.sum, lambda y: y.square().sum()], ids=["sum", "square"])
@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_a_graph_is_split_once(needs: bool, above: Callable[[Tensor], Tensor]) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=needs)
    loss = above(layer(x))
    split.backward_input(loss, None, [x])[1].run()
    before = layer.weight.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        split.backward_input(loss, None, [x])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    torch.testing.assert_close(layer.weight.grad, before, rtol=0, atol=0)


def test_a_sparse_gradient_owns_its_indices() -> None:
    table, indices = nn.Embedding(5, 4, sparse=True), torch.tensor([0, 2, 2])
    split.backward_input(table(indices).sum())[1].run()
    before = table.weight.grad.to_dense()
    indices.fill_(4)
    torch.testing.assert_close(table.weight.grad.to_dense(), before, rtol=0, atol=0)


def test_parameters_that_were_swapped_between_the_halves() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    _, pending = split.backward_input(layer(x).sum())
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(RuntimeError, match="swap"):
        pending.run()


@pytest.mark.parametrize("kind", ["eager", "checkpointed", "compiled"])
@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_training_without_hooks_takes_the_straight_way(kind: str, needs: bool) -> None:
    """Hooks of our own must not be taken for somebody's, or W would go through the engine for nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    call = {
        "eager": model,
        "checkpointed": lambda x: checkpoint(model, x, use_reentrant=False),
        "compiled": torch.compile(model, backend="sternway", options={"inner": "eager"}),
    }[kind]

    def step() -> int:
        x = torch.randn(3, 4, requires_grad=needs)
        split.backward_input(call(x).sum(), None, [x])[1].run()
        return UNSEEN.horizon

    step()
    step()
    assert step() == step()
