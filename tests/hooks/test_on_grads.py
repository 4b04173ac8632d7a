"""One call for many gradients: when it comes, with what, how often; and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from sternway import hooks
from sternway.errors import HookError


class _NoGradient(torch.autograd.Function):
    """Passes its input on; its gradient is undefined."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


class _Fails(torch.autograd.Function):
    fail = True

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if _Fails.fail:
            raise ValueError("on purpose")
        return grad


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def _shown(calls: list) -> list:
    """Calls as plain lists, for comparing."""
    return [[None if grad is None else grad.tolist() for grad in grads] for grads in calls]


@pytest.fixture
def calls() -> list:
    return []


def test_all_comes_once_with_every_gradient(calls: list) -> None:
    a, b = _leaf(), _leaf(3.0, 4.0)
    hooks.on_grads([a, b], calls.append)
    for _ in range(3):
        (a * b).sum().backward()
    assert _shown(calls) == [[[3.0, 4.0], [1.0, 2.0]]] * 3


def test_all_comes_in_the_middle_not_at_the_end(calls: list) -> None:
    """When the last gradient of the group has come, the rest of the backward is still ahead."""
    x = _leaf()
    low = x * 2
    middle = low * 3
    top = middle * 4
    order: list[str] = []
    low.register_hook(lambda grad: order.append("low"))
    x.register_hook(lambda grad: order.append("x"))
    hooks.on_grads([middle, top], lambda grads: order.append("group"))
    top.sum().backward()
    assert order == ["group", "low", "x"]


@pytest.mark.parametrize("as_place", [lambda t: t, get_gradient_edge, lambda t: t.grad_fn])
def test_tensors_edges_and_nodes(calls: list, as_place: Callable) -> None:
    x = _leaf()
    y = x * 2
    z = y * y
    hooks.on_grads([as_place(y), as_place(z)], calls.append)
    z.sum().backward()
    assert _shown(calls) == [[[4.0, 8.0], [1.0, 1.0]]]


def test_one_place_may_come_alone(calls: list) -> None:
    x = _leaf()
    hooks.on_grads(x, calls.append)
    hooks.on_grads(get_gradient_edge(x), calls.append)
    (2 * x).sum().backward()
    assert _shown(calls) == [[[2.0, 2.0]]] * 2


def test_one_output_of_several(calls: list) -> None:
    first, second = torch.arange(4.0, requires_grad=True).view(2, 2).unbind()
    node = first.grad_fn
    hooks.on_grads([GradientEdge(node, 1), GradientEdge(node, 0)], calls.append)
    (first.sum() + 5 * second.sum()).backward()
    assert _shown(calls) == [[[5.0, 5.0], [1.0, 1.0]]]
    with pytest.raises(HookError, match=r"UnbindBackward0 with 2 outputs.*GradientEdge"):
        hooks.on_grads([node], calls.append)
    with pytest.raises(HookError, match="output 2 of a UnbindBackward0 with 2"):
        hooks.on_grads([GradientEdge(node, 2)], calls.append)


def test_a_python_function_as_place(calls: list) -> None:
    y = _NoGradient.apply(_leaf())
    hooks.on_grads([get_gradient_edge(y)], calls.append)
    y.sum().backward()
    assert _shown(calls) == [[[1.0, 1.0]]]


@pytest.mark.parametrize("as_place", [lambda t: t, get_gradient_edge])
def test_autograd_grad(calls: list, as_place: Callable) -> None:
    """Gradients that are asked for, at leaves and inside; what the call does not compute is None."""
    a, b = _leaf(), _leaf(3.0, 4.0)
    c = a * b
    d = c * 2
    hooks.on_grads([as_place(t) for t in (a, b, c, d)], calls.append)
    found = torch.autograd.grad(d.sum(), [a, c], retain_graph=True)
    assert _shown(calls) == [[[6.0, 8.0], None, [2.0, 2.0], [1.0, 1.0]]]
    assert _shown([found]) == [[[6.0, 8.0], [2.0, 2.0]]]
    calls.clear()
    torch.autograd.grad(d.sum(), [c])
    assert _shown(calls) == [[None, None, [2.0, 2.0], [1.0, 1.0]]]


def test_backward_with_inputs(calls: list) -> None:
    a, b = _leaf(), _leaf(3.0, 4.0)
    c, d = a * b, a * b
    hooks.on_grads([a, b, c, d], calls.append)
    c.sum().backward(retain_graph=True)
    c.sum().backward(inputs=[a], retain_graph=True)
    assert [[grad is not None for grad in grads] for grads in calls] == [
        [True, True, True, False],
        [True, False, True, False],
    ]


def test_undefined_gradients_are_none(calls: list) -> None:
    a, b = _leaf(), _leaf()
    inner = a * 1
    hooks.on_grads([a, b, inner], calls.append)
    (_NoGradient.apply(inner) + b).sum().backward()
    assert _shown(calls) == [[None, [1.0, 1.0], None]]


def test_a_failed_backward_leaves_nothing(calls: list) -> None:
    a, b = _leaf(), _leaf()
    group = hooks.on_grads([a, b], calls.append)._stop.__self__
    for _ in range(5):
        with pytest.raises(ValueError, match="on purpose"):
            (a * 2 + _Fails.apply(b)).sum().backward()
    assert calls == []
    gc.collect()
    assert len(group.runs) == 0
    _Fails.fail = False
    try:
        (a * 2 + _Fails.apply(b)).sum().backward()
    finally:
        _Fails.fail = True
    assert _shown(calls) == [[[2.0, 2.0], [1.0, 1.0]]]
    gc.collect()
    assert len(group.runs) == 0


def test_an_error_in_the_function_stops_the_backward() -> None:
    a = _leaf()

    def fail(grads: tuple) -> None:
        raise KeyError("mine")

    with hooks.on_grads([a], fail), pytest.raises(KeyError, match="mine"):
        a.sum().backward()
    assert a.grad is None


@pytest.mark.parametrize("mode", ["all", "any"])
def test_nothing_grows(mode: str, calls: list) -> None:
    a, b = _leaf(), _leaf()
    group = hooks.on_grads([a, b], calls.append, mode=mode)._stop.__self__
    for _ in range(20):
        (a * b).sum().backward()
    assert len(calls) == 20
    assert len(group.runs) == 0


def test_any_comes_once_with_the_first_that_is_defined(calls: list) -> None:
    a, b = _leaf(), _leaf(3.0, 4.0)
    c = a * b
    with hooks.on_grads([a, b, c], calls.append, mode="any"):
        c.sum().backward()
    assert [grad.tolist() for grad in calls] == [[1.0, 1.0]]
    calls.clear()
    with hooks.on_grads([a], calls.append, mode="any"):
        _NoGradient.apply(a).sum().backward()
    assert calls == [None]


def test_a_backward_inside_a_backward_is_its_own(calls: list) -> None:
    """A reentrant checkpoint's parameters get their gradients from an engine call of their own."""
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    hooks.on_grads([inner.weight, outer.weight], calls.append)
    outer(checkpoint(inner, _leaf(), use_reentrant=True)).sum().backward()
    assert sorted([grad is not None for grad in grads] for grads in calls) == [[False, True], [True, False]]


def test_threads_do_not_mix(calls: list) -> None:
    a, b = _leaf(), _leaf(3.0, 4.0)
    hooks.on_grads([a, b], calls.append)

    def work(scale: float) -> None:
        for _ in range(50):
            torch.autograd.grad((scale * a * b).sum(), [a, b])

    threads = [threading.Thread(target=work, args=(float(scale),)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[[3.0 * s, 4.0 * s], [1.0 * s, 2.0 * s]] for s in (1, 2, 3) for _ in range(50)]
    assert sorted(_shown(calls)) == sorted(expected)


def test_double_backward(calls: list) -> None:
    a = _leaf()
    y = (a**3).sum()
    hooks.on_grads([a], calls.append)
    (first,) = torch.autograd.grad(y, a, create_graph=True)
    first.sum().backward()
    assert _shown(calls) == [[[3.0, 12.0]], [[6.0, 12.0]]]
    assert calls[0][0].requires_grad


def test_retain_graph(calls: list) -> None:
    a = _leaf()
    y = a * a
    hooks.on_grads([a, y], calls.append)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert _shown(calls) == [[[2.0, 4.0], [1.0, 1.0]]] * 2


def test_a_place_given_twice(calls: list) -> None:
    a = _leaf()
    hooks.on_grads([a, a], calls.append)
    a.sum().backward()
    assert _shown(calls) == [[[1.0, 1.0]] * 2]


def test_a_sparse_leaf(calls: list) -> None:
    table, x = torch.eye(2).to_sparse().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    hooks.on_grads([table, x], calls.append)
    torch.sparse.mm(table, x).sum().backward()
    ((of_table, of_x),) = calls
    assert of_table.is_sparse
    torch.testing.assert_close(of_x, torch.ones(2, 2))


def test_a_backward_in_inference_mode(calls: list) -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hooks.on_grads([a, b], calls.append)
    y = 2 * a + 3 * b
    with torch.inference_mode():
        y.backward()
    assert [tuple(grad.item() for grad in grads) for grads in calls] == [(2.0, 3.0)]


def test_a_tensor_changed_in_place_later(calls: list) -> None:
    """The hook stays where it was put: on the value before the change."""
    a, b = _leaf(), _leaf()
    y = a * 2
    hooks.on_grads([y, b], calls.append)
    y.mul_(5)
    (y + b).sum().backward()
    assert _shown(calls) == [[[5.0, 5.0], [1.0, 1.0]]]


def test_a_living_place_that_this_backward_passes_by(calls: list) -> None:
    """Edges whose tensors are gone: nobody holds the top one's node, and the call comes at the end."""
    x = _leaf()
    low = x * 2
    top = low * 3
    edges = [get_gradient_edge(low), get_gradient_edge(top)]
    hooks.on_grads(edges, calls.append)
    del edges
    low.sum().backward(retain_graph=True)
    assert _shown(calls) == [[[1.0, 1.0], None]]
    calls.clear()
    top.sum().backward()
    assert _shown(calls) == [[[3.0, 3.0], [1.0, 1.0]]]


def test_registered_while_a_backward_runs(calls: list) -> None:
    x = _leaf()
    low = x * 2
    top = low * 3
    low.register_hook(lambda grad: hooks.on_grads([top, x], calls.append) and None)
    top.sum().backward()
    assert _shown(calls) == [[None, [6.0, 6.0]]]


def test_handles(calls: list) -> None:
    a = _leaf()
    handle = hooks.on_grads([a, get_gradient_edge(a * 2)], calls.append)
    handle.remove()
    handle.remove()
    a.sum().backward()
    with hooks.on_grads([a], calls.append) as same:
        assert isinstance(same, hooks.Handle)
        a.sum().backward()
    a.sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_is_not_copied(copying: Callable) -> None:
    handle = hooks.on_grads([_leaf()], print)
    with pytest.raises(HookError, match=r"cannot be pickled or copied.*register the hook again"):
        copying(handle)


def test_nothing_is_kept_alive() -> None:
    """Neither a parameter, nor a graph with several places in it; the handles are still there."""
    leaf = _leaf()
    inside = leaf * 2
    above = inside * leaf
    told = [weakref.ref(leaf), weakref.ref(inside), weakref.ref(above)]
    handles = [
        hooks.on_grads([leaf, inside, above], lambda grads: None),
        hooks.on_grads([get_gradient_edge(inside), get_gradient_edge(above)], lambda grads: None),
    ]
    del leaf, inside, above
    assert [tensor() for tensor in told] == [None] * 3
    assert len(handles) == 2


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            [torch.ones(2)],
            r"must require a gradient for one to arrive; got places\[0\] of shape \(2,\) with requires_grad=False",
        ),
        (["x"], "a tensor, a GradientEdge or a graph node; got places"),
        ([], "places cannot be empty"),
    ],
)
def test_places_that_are_refused(places: list, message: str) -> None:
    with pytest.raises(HookError, match=message):
        hooks.on_grads(places, print)


def test_arguments_that_are_refused() -> None:
    with pytest.raises(HookError, match='must be "all" or "any"; got \'some\''):
        hooks.on_grads([_leaf()], print, mode="some")  # type: ignore[arg-type]
    with pytest.raises(HookError, match="fn must be a function of the gradients"):
        hooks.on_grads([_leaf()], None)  # type: ignore[arg-type]


def test_collect_leaves_no_hook() -> None:
    x = _leaf()
    hidden = x * 3
    with hooks.collect([hidden, get_gradient_edge(hidden), x]) as grads:
        (hidden * 2).sum().backward(retain_graph=True)
        (hidden * 4).sum().backward(retain_graph=True)
    (hidden * 8).sum().backward()
    assert grads[0].tolist() == grads[1].tolist() == [4.0, 4.0]
    assert [grad.tolist() for grad in grads.history(2)] == [[6.0, 6.0], [12.0, 12.0]]
    assert len(grads) == len(grads[0:]) == 3
    assert repr(grads) == "Collected(3 of 3 places have a gradient)"
    assert not hidden.retains_grad
    with hooks.collect(x) as one:
        pass
    assert one[0] is None
    with pytest.raises(HookError, match="places cannot be empty"), hooks.collect([]):
        pass
