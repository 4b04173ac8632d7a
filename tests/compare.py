"""The comparison that every test of the split rests on: the same model, once with a plain backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sternway import split
from sternway.split import Pending


def twin(model: nn.Module, *inputs: Any) -> tuple[Any, ...]:
    """A deep copy of the model, and leaves of their own for the inputs."""

    def leaf(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return (copy.deepcopy(model), *map(leaf, inputs))


def assert_same_grads(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    pairs = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(reference.named_parameters(remove_duplicate=False)),
    )
    assert pairs[0].keys() == pairs[1].keys()
    for name, parameter in pairs[0].items():
        expected = pairs[1][name].grad
        assert (parameter.grad is None) == (expected is None), f"{name}: {parameter.grad} against {expected}"
        if expected is not None:
            torch.testing.assert_close(
                parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )


def assert_split_equals_backward(
    model: nn.Module,
    *inputs: Any,
    call: Callable[..., Tensor] = lambda model, *inputs: model(*inputs),
    rounds: int = 2,
    **tolerance: float,
) -> Pending:
    """Split ``call(model, *inputs)`` and compare every gradient with plain autograd's; the last Pending, already run.

    Two rounds, so that both the first gradient and the adding to it are looked at.
    """
    model.zero_grad()  # it may be a parameter of a test that runs twice
    reference, *their_inputs = twin(model, *inputs)
    for _ in range(rounds):
        state = torch.get_rng_state()
        theirs = call(reference, *their_inputs)
        grad = torch.randn_like(theirs)
        theirs.backward(grad)

        after = torch.get_rng_state()
        grads_before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        torch.set_rng_state(state)
        ours = call(model, *inputs)
        torch.set_rng_state(after)
        torch.testing.assert_close(ours, theirs)
        grads, pending = split.backward_input(ours, grad, inputs)
        for p, before in zip(model.parameters(), grads_before, strict=True):  # I touches no .grad
            assert (p.grad is None) == (before is None)
            if before is not None:
                torch.testing.assert_close(p.grad, before, rtol=0, atol=0)
        for mine, value, their in zip(grads, inputs, their_inputs, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                if their.grad is None:
                    assert mine is None
                else:
                    torch.testing.assert_close(mine, their.grad, **tolerance)
                their.grad = None
                assert value.grad is None
            else:
                assert mine is None
        pending.run()
    assert_same_grads(model, reference, **tolerance)
    return pending


def names(model: nn.Module, parameters: tuple[Tensor, ...]) -> set[str]:
    """The names of some of a model's parameters."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_id[id(parameter)] for parameter in parameters}
