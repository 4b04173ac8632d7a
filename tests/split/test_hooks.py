"""Every kind of hook runs exactly once, with the value it has in a plain backward; a parameter's hooks run in W."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway import split

Log = list[tuple[str, Tensor]]


def _watch(model: nn.Module, log: Log, hook: Callable[[nn.Module, str, nn.Parameter, Log], None]) -> None:
    for name, parameter in model.named_parameters():
        hook(model, name, parameter, log)


def _tensor_hook(model: nn.Module, name: str, parameter: nn.Parameter, log: Log) -> None:
    parameter.register_hook(lambda grad: log.append((name, grad.clone())))


def _changing_hook(model: nn.Module, name: str, parameter: nn.Parameter, log: Log) -> None:
    parameter.register_hook(lambda grad: grad * 2)
    _tensor_hook(model, name, parameter, log)


def _post_accumulate(model: nn.Module, name: str, parameter: nn.Parameter, log: Log) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: log.append((name, p.grad.clone())))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    tied = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), tied, nn.Tanh(), tied)


@pytest.mark.parametrize("hook", [_tensor_hook, _changing_hook, _post_accumulate])
@pytest.mark.parametrize("rounds", [1, 2])
def test_parameter_hooks_run_once_each_in_w(model: nn.Module, hook: Callable, rounds: int) -> None:
    reference, their_log, log = twin(model)[0], [], []
    _watch(model, log, hook)
    _watch(reference, their_log, hook)
    for _ in range(rounds):
        x = torch.randn(5, 4)
        log.clear()
        their_log.clear()
        reference(x).square().sum().backward()
        _, pending = split.backward_input(model(x).square().sum())
        assert log == []
        pending.run()
        assert sorted(name for name, _ in log) == sorted(name for name, _ in their_log)
        expected = dict(their_log)
        for name, value in log:
            torch.testing.assert_close(value, expected[name])
    assert_same_grads(model, reference)


def test_a_hook_that_frees_the_gradient(model: nn.Module) -> None:
    """Optimizer-in-backward: the hook steps and drops the gradient."""

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    reference = twin(model)[0]
    for either in (model, reference):
        for parameter in either.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    x = torch.randn(5, 4)
    reference(x).square().sum().backward()
    split.backward_input(model(x).square().sum())[1].run()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("change", [False, True], ids=["sees", "changes"])
def test_hooks_on_intermediates(model: nn.Module, change: bool) -> None:
    """On the very output of a matrix product too: there the split must catch the gradient as the hook left it."""
    reference, logs = twin(model)[0], ([], [])
    x = torch.randn(5, 4, requires_grad=True)
    their_x = x.detach().clone().requires_grad_()

    def run(model: nn.Module, x: Tensor, log: Log) -> Tensor:
        for index, layer in enumerate(model):
            x = layer(x)

            def hook(grad: Tensor, index: int = index) -> Tensor | None:
                log.append((str(index), grad.clone()))
                return grad * 3 if change else None

            x.register_hook(hook)
        return x.square().sum()

    run(reference, their_x, logs[1]).backward()
    grad, pending = split.backward_input(run(model, x, logs[0]), None, x)
    pending.run()
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]] == ["4", "3", "2", "1", "0"]
    for (_, mine), (_, theirs) in zip(*logs, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(grad, their_x.grad)
    assert_same_grads(model, reference)


def test_node_prehooks_on_a_cut() -> None:
    layer, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(5, 4, requires_grad=True)
    for either in (layer, reference):
        y = either(x)
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        if either is reference:
            y.sum().backward()
        else:
            split.backward_input(y.sum(), None, x)[1].run()
    assert_same_grads(layer, reference)


def test_retain_grad() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    h = layer(x)
    h.retain_grad()
    split.backward_input(h.square().sum(), None, x)[1].run()
    torch.testing.assert_close(h.grad, 2 * h.detach())


def test_full_backward_module_hooks(model: nn.Module) -> None:
    log: list[str] = []
    for name, module in model.named_modules(remove_duplicate=True):
        module.register_full_backward_pre_hook(lambda module, grads, name=name: log.append(f"pre {name}"))
        module.register_full_backward_hook(lambda module, grads, outs, name=name: log.append(f"post {name}"))
    reference = twin(model)[0]
    x = torch.randn(5, 4, requires_grad=True)
    reference(x).square().sum().backward()
    expected = list(log)
    log.clear()
    x.grad = None
    split.backward_input(model(x).square().sum(), None, x)[1].run()
    assert log == expected
    assert log.count("post 2") == 2  # the tied layer, called twice
    assert_same_grads(model, reference)


def test_a_module_hook_that_changes_the_input_gradient(model: nn.Module) -> None:
    for module in model:
        module.register_full_backward_hook(lambda module, grads, outs: tuple(grad * 2 for grad in grads))
    reference = twin(model)[0]
    x = torch.randn(5, 4, requires_grad=True)
    reference(x).square().sum().backward()
    expected, x.grad = x.grad, None
    grad, pending = split.backward_input(model(x).square().sum(), None, x)
    pending.run()
    torch.testing.assert_close(grad, expected)
    assert_same_grads(model, reference)
