"""Halves of several backwards at the same time: in threads, and inside each other's hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, twin
from compiled import compiled
from sternway import split
from sternway.split._rules import RULES
from sternway.split.compiled import _halves

LONG = 60.0  # seconds until a thread that waits gives up
SHORT = 0.2  # seconds in which another thread would do what it must not


class Pair:
    """Two threads; ``join`` raises what they raised."""

    def __init__(self, *targets: Callable[[], None]) -> None:
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(target,)) for target in targets]
        for thread in self._threads:
            thread.start()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            self._failed.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG)
        assert not self._failed, self._failed
        assert not any(thread.is_alive() for thread in self._threads)


def x_of(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


class Slow(torch.autograd.Function):
    """The identity, whose weight's gradient is computed by a rule that can be held up."""

    when_w_runs: Callable[[], Any] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


def _slow_weight(node: Any) -> split.Later:
    def compute(grad: Tensor, x: Tensor) -> Tensor:
        Slow.when_w_runs()
        return grad * x

    return split.Later(compute, node.saved_tensors[0])


@pytest.fixture
def _slow_rule() -> Iterator[None]:
    split.rule("SlowBackward", operand=1)(_slow_weight)
    yield
    del RULES["SlowBackward"]


def inside_a_backward(call: Callable[[], None]) -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: call())
    leaf.sum().backward()


@pytest.mark.usefixtures("_slow_rule")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in hooks"])
def test_two_w_that_share_a_parameter_take_turns(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    inputs = [x_of(4) for _ in range(3)]
    pendings = [split.backward_input(Slow.apply(x, weight).sum(), None, x)[1] for x in inputs[:2]]
    apart = split.backward_input(Slow.apply(inputs[2], other).sum(), None, inputs[2])[1]
    began, second = threading.Event(), threading.Event()
    was_alone = []

    def when_w_runs() -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the one that shares nothing, which does not wait
        if not began.is_set():
            began.set()
            was_alone.append(not second.wait(SHORT))
        else:
            second.set()

    monkeypatch.setattr(Slow, "when_w_runs", staticmethod(when_w_runs))
    pair = Pair(*[partial(inside_a_backward, pending.run) if inside else pending.run for pending in pendings])
    assert began.wait(LONG)
    apart.run()
    pair.join()
    assert was_alone == [True]
    torch.testing.assert_close(weight.grad, (inputs[0] + inputs[1]).detach())
    torch.testing.assert_close(other.grad, inputs[2].detach())


def test_w_inside_a_hook_of_another_w_does_not_wait() -> None:
    layer, seen = nn.Linear(4, 4), []
    first, second = [split.backward_input(layer(x).sum(), None, x)[1] for x in (x_of(3, 4), x_of(3, 4))]
    reference = twin(layer)[0]

    def run_second(parameter: nn.Parameter) -> None:
        if not seen:
            seen.append(parameter)
            second.run()

    layer.bias.register_post_accumulate_grad_hook(run_second)
    thread = threading.Thread(target=first.run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()
    reference(torch.ones(6, 4)).sum().backward()
    torch.testing.assert_close(layer.bias.grad, reference.bias.grad)


def test_w_inside_a_hook_does_not_wait_for_one_that_runs_hooks() -> None:
    """As where a device's thread runs the hooks: that one waits until the hook is over."""
    layer, began, over = nn.Linear(4, 4), threading.Event(), threading.Event()
    first, second = [split.backward_input(layer(x).sum(), None, x)[1] for x in (x_of(3, 4), x_of(3, 4))]

    def wait(grad: Tensor) -> None:
        if not began.is_set():
            began.set()
            assert over.wait(LONG)

    def late() -> None:
        assert began.wait(LONG)
        inside_a_backward(second.run)
        over.set()

    layer.bias.register_hook(wait)
    Pair(first.run, late).join()
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 6.0))


def test_a_hook_is_still_there_after_two_i_at_once() -> None:
    norm, (x, y), calls, pendings = nn.LayerNorm(4), (x_of(3, 4), x_of(3, 4)), [], []
    norm.weight.register_hook(lambda grad: calls.append(grad.clone()))
    inside, beside, over = threading.Event(), threading.Event(), threading.Event()
    first, second = norm(x), norm(y)

    def meet(mine: threading.Event, other: threading.Event) -> None:
        mine.set()
        assert other.wait(LONG)

    first.register_hook(lambda grad: meet(inside, beside))
    second.register_hook(lambda grad: meet(beside, over))

    def early() -> None:
        pendings.append(split.backward_input(first.sum(), None, x)[1])
        over.set()

    def late() -> None:
        assert inside.wait(LONG)
        pendings.append(split.backward_input(second.sum(), None, y)[1])

    Pair(early, late).join()
    assert not calls
    for pending in pendings:
        pending.run()
    assert len(calls) == 2
    torch.testing.assert_close(norm.weight.grad, calls[0] + calls[1])


def test_w_inside_a_hook_of_an_i_runs_the_hooks_of_its_parameters() -> None:
    norm, (x, y), calls = nn.LayerNorm(4), (x_of(3, 4), x_of(3, 4)), []
    norm.weight.register_hook(lambda grad: calls.append(grad.clone()))
    waiting = split.backward_input(norm(x).sum(), None, x)[1]
    out = norm(y)
    out.register_hook(lambda grad: waiting.run())
    _, pending = split.backward_input(out.sum(), None, y)
    assert len(calls) == 1
    pending.run()
    assert len(calls) == 2
    torch.testing.assert_close(norm.weight.grad, calls[0] + calls[1])


def test_a_hook_that_waits_for_w_runs_in_a_grad_inside_i() -> None:
    norm, (x, y), calls, found = nn.LayerNorm(4), (x_of(3, 4), x_of(3, 4)), [], []

    def double(grad: Tensor) -> Tensor:
        calls.append(grad.clone())
        return 2 * grad

    norm.weight.register_hook(double)
    other, out = norm(y).sum(), norm(x)
    out.register_hook(lambda grad: found.extend(torch.autograd.grad(other, norm.weight)))
    pending = split.backward_input(out.sum(), None, x)[1]
    assert len(calls) == 1
    torch.testing.assert_close(found[0], 2 * calls[0])
    pending.run()
    assert len(calls) == 2
    torch.testing.assert_close(norm.weight.grad, 2 * calls[1])


def test_a_hook_that_ran_in_i_runs_in_a_backward_inside_w() -> None:
    norm, scale, (x, y), calls, forwards = (
        nn.LayerNorm(4),
        nn.Parameter(torch.ones(4)),
        (x_of(3, 4), x_of(3, 4)),
        [],
        [],
    )

    def forward(x: Tensor) -> Tensor:
        forwards.append(x)
        if len(forwards) == 2:  # the checkpoint recomputes, in I
            norm.weight.register_hook(lambda grad: calls.append(grad.clone()))
        return norm(x)

    other = norm(y).sum()
    pending = split.backward_input((checkpoint(forward, x, use_reentrant=False) * scale).sum(), None, x)[1]
    assert len(calls) == 1
    scale.register_post_accumulate_grad_hook(lambda parameter: other.backward())
    pending.run()
    assert len(calls) == 2
    torch.testing.assert_close(norm.weight.grad, calls[0] + calls[1])


@pytest.mark.filterwarnings("default:::torch")
def test_the_first_backwards_of_a_compiled_region_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fast, reference = compiled(model), twin(model)[0]
    fast(x_of(3, 4)).sum().backward()  # compiles, and needs no marks
    model.zero_grad()
    batches, pendings, made = [x_of(3, 4), x_of(3, 4)], [], []
    outputs = [fast(x).sum() for x in batches]
    inside, over = threading.Event(), threading.Event()
    empty = torch.empty

    def slow_empty(*args: Any, **options: Any) -> Tensor:
        made.append(empty(*args, **options))
        if len(made) == 2:  # the first thread has made some of the marks
            inside.set()
            over.wait(SHORT)
        return made[-1]

    monkeypatch.setattr(_halves.torch, "empty", slow_empty)

    def late() -> None:
        assert inside.wait(LONG)
        pendings.append(split.backward_input(outputs[1], None, batches[1])[1])
        over.set()

    Pair(lambda: pendings.append(split.backward_input(outputs[0], None, batches[0])[1]), late).join()
    monkeypatch.undo()
    for pending in pendings:
        pending.run()
    for x in batches:
        reference(x).sum().backward()
    assert_same_grads(model, reference)
