"""What a captured module does around its graphs, on a CPU: the graphs are replaced by the calls that they stand for."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
from called_graphs import CalledForm, CalledSet
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway import split
from sternway._tree import put_tensors
from sternway.errors import PendingError, SplitError
from sternway.split.captured import _capture
from sternway.split.captured._form import CallForm
from sternway.split.captured._grads import GradBuffers


@pytest.fixture(autouse=True)
def _called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_capture, "CapturedForm", CalledForm)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


def both(in_flight: int = 1) -> tuple[split.Captured, nn.Module, nn.Module]:
    module = mlp()
    return split.Captured(module, in_flight=in_flight), module, twin(module)[0]


def microbatch(first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, 6, requires_grad=not first)
    return x, x.detach().clone().requires_grad_(not first), torch.randn(3, 4)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["middle", "first"])
def test_split_equals_backward(first: bool, exact: bool) -> None:
    stage, module, reference = both()
    for _ in range(3):
        x, theirs, grad = microbatch(first)
        reference(theirs).backward(grad)
        found, pending = split.backward_input(stage(x), grad, () if first else x, exact=exact)
        assert set(pending.deferred) == set(module.parameters())
        pending.run()
        if not first:
            torch.testing.assert_close(found, theirs.grad)
    assert_same_grads(module, reference)
    assert stage.sets == 1
    assert not stage.refusals


def test_plain_backward() -> None:
    stage, module, reference = both()
    for _ in range(3):
        x, theirs, grad = microbatch()
        reference(theirs).backward(grad)
        stage(x).backward(grad)
        torch.testing.assert_close(x.grad, theirs.grad)
    assert_same_grads(module, reference)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_in_flight_in_any_order(order: tuple[int, ...]) -> None:
    stage, module, reference = both(3)
    for _ in range(2):
        pendings = []
        for _ in range(3):
            x, theirs, grad = microbatch()
            reference(theirs).backward(grad)
            pendings.append(split.backward_input(stage(x), grad, x)[1])
        for number in order:
            pendings[number].run()
    assert_same_grads(module, reference)


def test_one_more_in_flight_is_refused_and_what_is_dropped_is_free() -> None:
    stage, *_ = both(2)
    first, _second = stage(torch.randn(3, 6)), stage(torch.randn(3, 6))
    with pytest.raises(SplitError, match=r"in_flight=2 microbatches; got one more.*pass in_flight=3"):
        stage(torch.randn(3, 6))
    del first
    _, pending = split.backward_input(stage(torch.randn(3, 6)), torch.ones(3, 4))
    with pytest.raises(SplitError, match="in_flight=2"):
        stage(torch.randn(3, 6))
    del pending
    stage(torch.randn(3, 6))


def test_an_output_that_is_kept_does_not_keep_its_set() -> None:
    stage, *_ = both()
    y = stage(torch.randn(3, 6))
    y.sum().backward()
    stage(torch.randn(3, 6))
    with pytest.raises(SplitError, match="a second time"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["none", "zeros", "own", "kept", "hooks after F", "frozen after F"])
def test_gradients_whoever_holds_them(way: str) -> None:
    stage, module, reference = both()
    kept: list[tuple[Tensor, Tensor]] = []
    seen: list[list[Tensor]] = [[], []]
    for number in range(4):
        x, theirs, grad = microbatch()
        outputs = stage(x), reference(theirs)
        for each, log in ((module, seen[0]), (reference, seen[1])):
            if way in ("none", "zeros") and number == 2:
                each.zero_grad(set_to_none=way == "none")
            if way == "kept" and number == 2:
                kept += [(p.grad, p.grad.clone()) for p in each.parameters()]
                each.zero_grad()
            if way == "own" and number == 1:
                for p in each.parameters():
                    p.grad = torch.full_like(p, 2.0)
            if way == "hooks after F" and number == 3:
                each[0].weight.register_hook(lambda g, log=log: log.append(g.clone()) or 2 * g)
            if way == "frozen after F" and number == 3:
                each[3].weight.requires_grad_(False)
        outputs[1].backward(grad)
        split.backward_input(outputs[0], grad, x)[1].run()
    assert_same_grads(module, reference)
    for tensor, value in kept:
        assert torch.equal(tensor, value)
    torch.testing.assert_close(seen[0], seen[1])
    assert len(seen[0]) == (1 if way.startswith("hooks") else 0)


def test_a_view_of_an_earlier_gradient_is_refused() -> None:
    stage, module, _ = both()
    stage(torch.randn(3, 6)).sum().backward()
    view = module[0].weight.grad[:1]
    module.zero_grad()
    with pytest.raises(PendingError, match=r"must not be kept.*shape \(8, 6\).*keep a copy"):
        stage(torch.randn(3, 6)).sum().backward()
    del view


def test_what_is_asked_of_the_engine_is_what_it_does() -> None:
    stage, module, reference = both()
    x, theirs, grad = microbatch()
    assert torch.equal(*(torch.autograd.grad(m(t), t, grad)[0] for m, t in ((stage, x), (reference, theirs))))
    assert all(p.grad is None for p in module.parameters())
    for m, t in ((stage, x), (reference, theirs)):
        weight = (module if m is stage else reference)[0].weight
        m(t).backward(grad)
        m(t).backward(grad, inputs=[weight])
    assert_same_grads(module, reference)
    with pytest.raises(SplitError, match=r"added to \.grad, and cannot be returned"):
        torch.autograd.grad(stage(x), list(module.parameters()), grad)
    with pytest.raises(SplitError, match=r"added to \.grad, and cannot be returned"):
        split.backward_input(stage(x), grad, [x, module[0].weight])


class TwoWays(nn.Module):
    """Several inputs, nested, and several outputs: one twice, one without a gradient, one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair: dict[str, Tensor], mask: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        left, right = self.left(pair["a"]) * scale, self.right(pair["b"]) * mask
        return {"left": left, "again": left, "both": (right, (left > 0).long()), "scale": scale}


def test_nested_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TwoWays()
    reference, stage = twin(module)[0], split.Captured(module, in_flight=1)

    class Called(nn.Module):
        def __init__(self, form: CallForm) -> None:
            super().__init__()
            self.inner, self._tree = module, form.tree

        def forward(self, *tensors: Tensor) -> Any:
            args, kwargs = put_tensors(self._tree, tensors)
            return self.inner(*args, **kwargs)

    def make(_: nn.Module, modules: Any, form: CallForm, tensors: list[Tensor], grads: GradBuffers) -> CalledForm:
        return CalledForm(Called(form), modules, form, tensors, grads)

    monkeypatch.setattr(_capture, "CapturedForm", make)
    for scale in (1.0, 2.0, 1.0):
        a, b, mask = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4), torch.randint(2, (2, 4))
        a2 = a.detach().clone().requires_grad_()
        mine, theirs = stage({"a": a, "b": b}, mask, scale=scale), reference({"a": a2, "b": b}, mask, scale=scale)
        assert mine["again"] is mine["left"]
        assert mine["scale"] == scale
        assert not mine["both"][1].requires_grad
        assert torch.equal(mine["both"][1], theirs["both"][1])
        sums = [(each["left"] * each["again"]).sum() + each["both"][0].sum() for each in (mine, theirs)]
        torch.testing.assert_close(*sums)
        found, pending = split.backward_input(sums[0], None, a)
        pending.run()
        sums[1].backward()
        torch.testing.assert_close(found, a2.grad)
    assert_same_grads(module, reference)
    assert stage.sets == 2, "one for each scale"


def test_forms_up_to_a_limit_and_then_as_it_is() -> None:
    module = mlp()
    stage = split.Captured(module, in_flight=1, forms=2)
    for rows in (1, 2, 1, 2):
        stage(torch.randn(rows, 6))
    assert stage.sets == 2
    with pytest.warns(UserWarning, match="Sequential runs as it is.*2 forms of call.*larger forms="):
        y = stage(torch.randn(5, 6))
    assert type(y.grad_fn).__name__ == "AddmmBackward0"
    stage(torch.randn(7, 6))  # one warning for all


def test_modes_and_constants_are_other_forms() -> None:
    module = mlp()
    form = lambda *args, **kwargs: CallForm.of(args, kwargs, list(module.modules()))[0]  # noqa: E731
    x = torch.randn(2, 6)
    assert form(x, scale=1).is_same(form(x.clone(), scale=1))
    assert not form(x, scale=1).is_same(form(x, scale=True))
    assert not form(x, scale=1).is_same(form(x, scale=2))
    assert not form(x).is_same(form(x.t().contiguous().t()))
    assert not form(x).is_same(form(x.clone().requires_grad_()))
    assert not form(x).is_same(form((x,)))
    trains = form(x)
    torch.set_float32_matmul_precision("high")
    try:
        assert not form(x).is_same(trains)
    finally:
        torch.set_float32_matmul_precision("highest")
    module.eval()
    assert not form(x).is_same(trains)
    assert form(x, object()).varying() == "object"
    assert form(x, [1, "a", None]).varying() is None


def test_an_argument_that_may_change_is_refused_by_name() -> None:
    class Holder:
        number = 1

    class Module(nn.Linear):
        def forward(self, x: Tensor, holder: Holder) -> Tensor:
            return super().forward(x) * holder.number

    stage = split.Captured(Module(2, 2), in_flight=1)
    holder = Holder()
    with pytest.warns(UserWarning, match="an argument is a Holder, which may change unnoticed"):
        first = stage(torch.ones(1, 2), holder)
    holder.number = 3
    torch.testing.assert_close(stage(torch.ones(1, 2), holder), 3 * first)
    assert len(stage.refusals) == 1


def test_hooks_and_policies_run_it_as_it_is() -> None:
    stage, module, _reference = both()
    seen = []
    stage(torch.randn(3, 6))
    handle = module[1].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="the module 1 has hooks, which run in Python"):
        stage(torch.randn(3, 6))
    stage(torch.randn(3, 6))
    assert len(seen) == 2
    handle.remove()
    stage(torch.randn(3, 6))
    assert len(seen) == 2
    with (
        pytest.warns(UserWarning, match="saved-tensor hooks"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        stage(torch.randn(3, 6))
    with torch.no_grad():
        assert stage(torch.randn(3, 6)).grad_fn is None
    assert len(stage.refusals) == 2


def test_a_w_that_fails_leaves_gradients_of_parameters_with_hooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a state run in W, and may raise."""
    stage, module, _ = both()
    module[0].weight.register_hook(lambda grad: None)
    x, _, grad = microbatch()
    split.backward_input(stage(x), grad, x)[1].run()
    before, replay = module[0].weight.grad.clone(), CalledSet.backward_weight
    _, pending = split.backward_input(stage(x), grad, x)

    def fail(self: CalledSet) -> None:
        replay(self)
        raise ValueError("of a function")

    monkeypatch.setattr(CalledSet, "backward_weight", fail)
    with pytest.raises(ValueError, match="of a function"):
        pending.run()
    assert torch.equal(module[0].weight.grad, before)


@pytest.mark.parametrize("plain", [False, True], ids=["split", "plain"])
def test_hooks_of_parameters_run(plain: bool) -> None:
    stage, module, reference = both()
    seen: list[list[Any]] = [[], []]
    for each, log in ((module, seen[0]), (reference, seen[1])):
        each[0].weight.register_hook(lambda grad, log=log: log.append(grad.clone()) or 2 * grad)
        each[3].bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    for _ in range(3):
        x, theirs, grad = microbatch()
        reference(theirs).backward(grad)
        if plain:
            stage(x).backward(grad)
        else:
            split.backward_input(stage(x), grad, x)[1].run()
    assert_same_grads(module, reference)
    assert stage.refusals == []
    assert stage.sets == 1
    by_shape = [sorted(log, key=lambda t: t.ndim) for log in seen]
    torch.testing.assert_close(*by_shape)
    assert len(seen[0]) == 6


@pytest.mark.parametrize("first", [False, True], ids=["middle", "first"])
def test_hooks_on_its_node_leave_it_split(first: bool) -> None:
    stage, module, reference = both()
    (x, theirs, grad), calls = microbatch(first), []
    reference(theirs).backward(grad)
    out = stage(x)
    out.grad_fn.register_hook(lambda grad_inputs, grad_outputs: calls.append(grad_outputs))
    found, pending = split.backward_input(out, grad, () if first else x)
    assert set(pending.deferred) == set(module.parameters())
    pending.run()
    assert len(calls) == 1
    assert_same_grads(module, reference)
    if not first:
        torch.testing.assert_close(found, theirs.grad)


def test_hooks_that_another_thread_sees_first() -> None:
    stage, module, _ = both()
    stage(torch.randn(3, 6))
    module[0].register_forward_hook(lambda *_: None)
    found: list[str] = []

    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage(torch.randn(3, 6))
        found.extend(stage.refusals)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == ["the module 0 has hooks, which run in Python"]


def test_parameters_that_move_are_captured_anew() -> None:
    stage, module, reference = both()
    before = stage._captured
    for change in (
        lambda m: m.double(),
        lambda m: m.__setitem__(0, nn.Linear(6, 8, dtype=torch.float64)),
        lambda m: m[3].requires_grad_(False),
    ):
        stage(torch.randn(3, 6, dtype=module[0].weight.dtype))
        assert stage._captured is not before
        before = stage._captured
        change(module)
    reference = copy.deepcopy(module)
    reference.zero_grad()
    module.zero_grad()
    x = torch.randn(3, 6, dtype=torch.float64)
    stage(x).sum().backward()
    reference(x).sum().backward()
    assert_same_grads(module, reference)
    module.load_state_dict({name: 2 * value for name, value in reference.state_dict().items()})
    before = stage._captured
    stage(x)
    assert stage._captured is before, "values were copied in place"


def test_a_table_that_is_replaced_is_captured_anew() -> None:
    class Scaled(nn.Linear):
        table = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.table

    module = Scaled(6, 4)
    module.table = 2 * torch.ones(4)
    stage, x = split.Captured(module, in_flight=1), torch.randn(3, 6)
    stage(x)
    before = stage._captured
    stage(x)
    assert stage._captured is before
    module.table = 3 * torch.ones(4)
    torch.testing.assert_close(stage(x), module(x))
    assert stage._captured is not before


def test_a_copy_captures_its_own() -> None:
    stage, module, _ = both()
    stage(torch.randn(3, 6)).sum().backward()
    other = copy.deepcopy(stage)
    assert other.sets == 0
    x = torch.randn(3, 6)
    other.zero_grad()
    module.zero_grad()
    other(x).sum().backward()
    module(x).sum().backward()
    assert_same_grads(other.module, module)
    assert list(stage.state_dict()) == [f"module.{name}" for name in module.state_dict()]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        SplitError, match=r"must be on a CUDA device.*got tensors on cpu, 1 of them.*Fix: call module\.to"
    ):
        split.capture(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(SplitError, match=r"in_flight must be a number from 1 on; got int 0"):
        split.Captured(nn.Linear(2, 2), in_flight=0)
