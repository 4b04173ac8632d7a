"""torch's ``register_multi_grad_hook`` on each of its defects, ours beside it; then what torch documents, of both."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph as torch_graph

from sternway.dropin import autograd_graph as ours
from sternway.errors import HookError


def _leaves() -> tuple[Tensor, Tensor]:
    return torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)


def _fail(grad: Tensor) -> None:
    raise ValueError("on purpose")


def _inner_state(tensor: Tensor, name: str) -> dict:
    """A closure variable of torch's hook on the tensor."""
    (hook,) = tensor._backward_hooks.values()
    return inspect.getclosurevars(hook).nonlocals[name]


def _fail_between(a: Tensor, b: Tensor) -> None:
    """A backward that reaches ``a`` and fails before ``b``."""
    inner = b * 1
    inner.register_hook(_fail)
    with pytest.raises(ValueError, match="on purpose"):
        (inner * 1 + a).sum().backward()


def test_torch_leaks_a_count_for_every_failed_backward_and_ours_does_not() -> None:
    a, b = _leaves()
    torch_graph.register_multi_grad_hook([a, b], lambda grads: None)
    for _ in range(3):
        _fail_between(a, b)
    assert len(_inner_state(a, "count")) == len(_inner_state(a, "buffer")) == 3

    a, b = _leaves()
    group = ours.register_multi_grad_hook([a, b], lambda grads: None)._stop.__self__
    for _ in range(3):
        _fail_between(a, b)
    assert len(group.runs) == 0


def test_torch_grows_in_any_mode_and_ours_does_not() -> None:
    a, b = _leaves()
    torch_graph.register_multi_grad_hook([a, b], lambda grad: None, mode="any")
    for _ in range(4):
        (a * b).sum().backward()
    assert len(_inner_state(a, "ran_hook")) == 4

    a, b = _leaves()
    group = ours.register_multi_grad_hook([a, b], lambda grad: None, mode="any")._stop.__self__
    for _ in range(4):
        (a * b).sum().backward()
    assert len(group.runs) == 0


def test_torch_refuses_edges_and_ours_takes_them() -> None:
    a, b = _leaves()
    c = a * b
    edge = torch_graph.get_gradient_edge(c)
    with pytest.raises(AttributeError, match="register_hook"):
        torch_graph.register_multi_grad_hook([edge], lambda grads: None)
    calls: list = []
    ours.register_multi_grad_hook([edge], calls.append)
    c.sum().backward()
    assert calls[0][0].tolist() == [1.0, 1.0]


def test_torch_breaks_autograd_grad_and_ours_does_not() -> None:
    a, b = _leaves()
    torch_graph.register_multi_grad_hook([a, b], lambda grads: None)
    with pytest.raises(RuntimeError, match="currently not supported"):
        torch.autograd.grad((a * b).sum(), [a, b])

    a, b = _leaves()
    calls: list = []
    ours.register_multi_grad_hook([a, b], calls.append)
    grads = torch.autograd.grad((a * b).sum(), [a, b])
    assert [grad.tolist() for grad in calls[0]] == [grad.tolist() for grad in grads]


def test_torch_keeps_a_hooked_parameter_for_ever_and_ours_does_not() -> None:
    def lives(register: object) -> bool:
        parameter = nn.Parameter(torch.ones(2))
        register([parameter], lambda grads: None)
        told = weakref.ref(parameter)
        del parameter
        gc.collect()
        return told() is not None

    assert lives(torch_graph.register_multi_grad_hook)
    assert not lives(ours.register_multi_grad_hook)


def test_torch_fails_to_pickle_a_handle_obscurely_and_ours_says_why() -> None:
    a, b = _leaves()
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(torch_graph.register_multi_grad_hook([a, b], print))
    with pytest.raises(HookError, match="cannot be pickled or copied"):
        pickle.dumps(ours.register_multi_grad_hook([a, b], print))


@pytest.mark.parametrize("module", [torch_graph, ours], ids=["torch", "ours"])
class TestDocumented:
    """What torch's documentation of ``register_multi_grad_hook`` promises holds for both."""

    def test_the_example(self, module: object) -> None:
        a, b = torch.rand(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
        c, d = a * b, a * b
        calls: list = []
        module.register_multi_grad_hook((a, b, c, d), lambda grads: calls.append([g is not None for g in grads]))
        c.sum().backward(retain_graph=True)
        c.sum().backward(inputs=(a,), retain_graph=True)
        assert calls == [[True, True, True, False], [True, False, True, False]]

    def test_the_gradients_are_a_list(self, module: object) -> None:
        a, b = _leaves()
        calls: list = []
        handle = module.register_multi_grad_hook((a, b), calls.append)
        assert isinstance(handle, torch.utils.hooks.RemovableHandle)
        (a * b).sum().backward()
        assert isinstance(calls[0], list)

    def test_any_takes_the_first_and_passes_over_what_needs_none(self, module: object) -> None:
        a, b = _leaves()
        c = a * b
        calls: list = []
        module.register_multi_grad_hook((a, torch.ones(2), c), calls.append, mode="any")
        (3 * c).sum().backward()
        assert [grad.tolist() for grad in calls] == [[3.0, 3.0]]

    def test_a_wrong_mode_is_a_value_error(self, module: object) -> None:
        with pytest.raises(ValueError, match="Expects mode to be one of"):
            module.register_multi_grad_hook(_leaves(), print, mode="foo")

    def test_removed_and_as_context(self, module: object) -> None:
        a, b = _leaves()
        calls: list = []
        with module.register_multi_grad_hook((a, b), calls.append):
            (a * b).sum().backward()
        (a * b).sum().backward()
        assert len(calls) == 1

    def test_hook_order(self, module: object) -> None:
        """Tensor hooks in the order of registration, then the node's pre-hooks, the node, its hooks."""
        a, _ = _leaves()
        y = a * 2
        order: list[str] = []
        y.register_hook(lambda grad: order.append("tensor"))
        module.register_multi_grad_hook([y], lambda grads: order.append("multi"))
        y.register_hook(lambda grad: order.append("tensor, later"))
        y.grad_fn.register_prehook(lambda grads: order.append("pre"))
        y.grad_fn.register_hook(lambda inputs, outputs: order.append("post"))
        a.register_post_accumulate_grad_hook(lambda leaf: order.append("accumulated"))
        y.sum().backward()
        assert order == ["tensor", "multi", "tensor, later", "pre", "post", "accumulated"]

    def test_it_sees_what_earlier_hooks_made_of_the_gradient(self, module: object) -> None:
        a, _ = _leaves()
        y = a * 2
        y.register_hook(lambda grad: grad * 10)
        calls: list = []
        module.register_multi_grad_hook([y], calls.append)
        y.sum().backward()
        assert calls[0][0].tolist() == [10.0, 10.0]

    def test_nodes_and_edges(self, module: object) -> None:
        a, b = _leaves()
        c = a * b
        edge = module.get_gradient_edge(c)
        assert isinstance(c.grad_fn, module.Node)
        assert isinstance(edge, module.GradientEdge)
        assert edge.node is c.grad_fn
        assert (edge.output_nr, edge.node.name()) == (0, "MulBackward0")
        assert [node.variable is leaf for (node, _), leaf in zip(edge.node.next_functions, (a, b), strict=True)]
        assert edge.node.metadata == {}
        with pytest.raises(RuntimeError, match="does not require gradients"):
            module.get_gradient_edge(torch.ones(2))

    def test_versions(self, module: object) -> None:
        x = torch.ones(2)
        module.increment_version(x)
        module.increment_version([x])
        assert x._version == 2

    def test_saved_tensor_hooks(self, module: object) -> None:
        a, b = _leaves()
        packed: list = []
        with module.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.detach(), lambda t: t):
            (a * b).sum().backward()
        assert len(packed) == 2
        with module.save_on_cpu():
            (a * b).sum().backward()
        with (
            module.disable_saved_tensors_hooks("not here"),
            pytest.raises(RuntimeError, match="not here"),
            module.save_on_cpu(),
        ):
            pass
        with module.allow_mutation_on_saved_tensors():
            c = a.clone()
            y = (c * c).sum()
            c.mul_(3)
            y.backward()
