"""What a compiled region meets: shared and tied parameters, hooks, checkpoints, randomness, mutation, other shapes."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, names, twin
from compiled import assert_compiled_equals_backward, compiled
from sternway import split
from sternway._torch.compile import forbid_donation
from sternway.errors import PendingError, SplitError, UnsupportedTorch

pytestmark = pytest.mark.filterwarnings("default:::torch")  # Dynamo and Inductor warn of themselves


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


class Mlp(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(nn.functional.gelu(self.up(x))))


def x_of(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_i_computes_no_product_of_w() -> None:
    model = Mlp()
    pending = assert_compiled_equals_backward(model, x_of(5, 4))
    assert names(model, pending.deferred) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    (graphs,) = split.inspect(model)
    products = [[node for node in graph.nodes if node.op.startswith("aten.mm")] for graph in (graphs.I, graphs.W)]
    assert [len(found) for found in products] == [2, 2]
    assert (graphs.early, graphs.late) == (2, 4)


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x).tanh(), self.right(x)

    model = Two()
    pending = assert_compiled_equals_backward(model, x_of(5, 4), call=lambda m, x: torch.cat(m(x)))
    assert names(model, pending.deferred) == {"left.weight", "left.bias", "right.weight", "right.bias"}


def test_parameters_shared_with_an_eager_part() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.fast = [compiled(self.inner)]

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner.down(self.inner.norm(self.inner.up(x)))  # eager: a product, a norm, a product
            return (self.fast[0] if self.fast else self.inner)(x)

    model = Shared()
    fast, model.fast = model.fast, []
    reference = twin(model)[0]
    model.fast = fast
    x = x_of(5, 4)
    their_x = x.detach().clone().requires_grad_()
    for _ in range(2):
        reference(their_x).square().sum().backward()
        grad, pending = split.backward_input(model(x).square().sum(), None, x)
        assert names(model, pending.ready) == {"inner.norm.weight", "inner.norm.bias"}
        pending.run()
    torch.testing.assert_close(2 * grad, their_x.grad)
    assert_same_grads(model, reference)


def test_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens).tanh())

    pending = assert_compiled_equals_backward(Tied(), torch.randint(0, 7, (5,)))
    assert len(pending.deferred) == 1


def test_one_compiled_code_for_many_blocks() -> None:
    model = gpt(8, 4, heads=2)
    reference, x = twin(model)[0], x_of(2, 3, 8)
    their_x = x.detach().clone().requires_grad_()
    for index, block in enumerate(model):
        model[index] = compiled(block)
    reference(their_x).square().sum().backward()
    grad, pending = split.backward_input(model(x).square().sum(), None, x)
    pending.run()
    torch.testing.assert_close(grad, their_x.grad)
    blocks = nn.Sequential(*(block._orig_mod for block in model))
    assert_same_grads(blocks, reference, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(split.inspect(model)) == 1
    assert len(split.inspect(model[3])) == 1  # compiled for another block, but this one's too


def test_several_calls_before_a_backward_in_any_order() -> None:
    model = Mlp()
    fast, reference = compiled(model), twin(model)[0]
    inputs = [torch.randn(5, 4) for _ in range(3)]
    outputs = [fast(x) for x in inputs]
    pendings = [split.backward_input(outputs[index].square().sum())[1] for index in (1, 0, 2)]
    for index in (2, 0, 1):
        pendings[index].run()
    for x in inputs:
        reference(x).square().sum().backward()
    assert_same_grads(model, reference)


def test_the_same_weights_twice_in_one_backward() -> None:
    model = Mlp()
    assert_compiled_equals_backward(model, x_of(5, 4), call=lambda model, x: model(model(x).tanh()))


@pytest.mark.parametrize("kind", ["tensor hook", "post accumulate"])
def test_hooks_on_parameters_run_once_each_in_w(kind: str) -> None:
    model = Mlp()
    fast, reference, log, their_log = compiled(model), twin(model)[0], {}, {}
    for which, record in ((model, log), (reference, their_log)):
        for name, parameter in which.named_parameters():
            if kind == "tensor hook":
                parameter.register_hook(lambda grad, name=name, record=record: record.update({name: grad.clone()}))
            else:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name, record=record: record.update({name: p.grad.clone()})
                )
    x = torch.randn(5, 4)
    reference(x).square().sum().backward()
    _, pending = split.backward_input(fast(x).square().sum())
    assert not log
    pending.run()
    assert log.keys() == their_log.keys()
    for name, value in log.items():
        torch.testing.assert_close(value, their_log[name])


def test_a_hook_on_the_compiled_node_gets_gradients_and_may_change_them() -> None:
    model, x = Mlp(), x_of(5, 4)
    fast, (reference, their_x) = compiled(model), twin(model, x)
    y, seen = fast(x).square().sum(), []

    def double(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        seen.extend(grad.clone() for grad in grads if grad is not None)
        return tuple([None if grad is None else 2 * grad for grad in grads])

    y.grad_fn.next_functions[0][0].next_functions[0][0].register_hook(double)
    grad, pending = split.backward_input(y, None, x)
    pending.run()
    (2 * reference(their_x).square().sum()).backward()
    torch.testing.assert_close(grad, their_x.grad)
    assert_same_grads(model, reference)
    assert sorted(g.abs().sum().item() for g in seen) == pytest.approx(
        sorted(g.abs().sum().item() / 2 for g in (their_x.grad, *(p.grad for p in reference.parameters())))
    )


def test_a_hook_that_steps_and_frees_the_gradient() -> None:
    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    model = Mlp()
    fast, reference = compiled(model), twin(model)[0]
    for either in (model, reference):
        for parameter in either.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    x = torch.randn(5, 4)
    reference(x).square().sum().backward()
    split.backward_input(fast(x).square().sum())[1].run()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_parameter_as_an_input_of_the_split() -> None:
    model, x = Mlp(), torch.randn(5, 4)
    weight = model.up.weight
    reference = twin(model)[0]
    reference(x).square().sum().backward()
    (grad,), pending = split.backward_input(compiled(model)(x).square().sum(), None, [weight])
    torch.testing.assert_close(grad, reference.up.weight.grad)
    pending.run()
    assert weight.grad is None
    torch.testing.assert_close(model.down.weight.grad, reference.down.weight.grad)


def test_frozen_parameters_and_a_weight_made_outside() -> None:
    model = Mlp()
    model.up.weight.requires_grad_(False)
    assert_compiled_equals_backward(model, x_of(5, 4))

    low, high = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
    fast = compiled(lambda x, weight: (x @ weight).tanh())
    x = x_of(5, 4)
    grad, pending = split.backward_input(fast(x, low @ high).sum(), None, x)
    pending.run()
    expected = torch.autograd.grad((x @ (low @ high)).tanh().sum(), [x, low, high])
    for mine, theirs in zip((grad, low.grad, high.grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Calls(nn.Module):
    """Counts through an operator that the compiler cannot see into."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inner, self.checkpointed = Mlp(), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.inner(counted(x))

        return checkpoint(body, x, use_reentrant=False) if self.checkpointed else body(x)


COUNTS = {"forward": 0, "backward": 0}


@torch.library.custom_op("sternway_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    COUNTS["forward"] += 1
    return x.clone()


@torch.library.custom_op("sternway_tests::counted_backward", mutates_args=())
def counted_backward(grad: Tensor) -> Tensor:
    COUNTS["backward"] += 1
    return grad.clone()


counted.register_fake(torch.empty_like)
counted_backward.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, grad: counted_backward(grad))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpoints_recompute_once_and_custom_operators_run_once(inner: str, checkpointed: bool) -> None:
    model = Calls(checkpointed)
    fast, reference, x = compiled(model, inner), twin(model)[0], x_of(5, 4)
    their_x = x.detach().clone().requires_grad_()
    reference(their_x).square().sum().backward()
    fast(x).square().sum().backward()
    torch.testing.assert_close(x.grad, their_x.grad)
    model.zero_grad()
    COUNTS.update(forward=0, backward=0)
    y = fast(x).square().sum()
    grad, pending = split.backward_input(y, None, x)
    assert (COUNTS["forward"], COUNTS["backward"]) == (1 + checkpointed, 1)
    pending.run()
    assert (COUNTS["forward"], COUNTS["backward"]) == (1 + checkpointed, 1)
    torch.testing.assert_close(grad, their_x.grad)
    assert_same_grads(model, reference)
    assert len(pending.deferred) >= 4


def test_a_checkpoint_around_a_compiled_block() -> None:
    model = Mlp()
    pending = assert_compiled_equals_backward(
        model, x_of(5, 4), call=lambda model, x: checkpoint(model, x, use_reentrant=False)
    )
    assert len(pending.deferred) == 4


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_has_one_mask(inner: str, checkpointed: bool) -> None:
    weight = nn.Parameter(torch.eye(64))

    def body(x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ weight, 0.5) * 3

    def function(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False) if checkpointed else body(x)

    fast, x = compiled(function, inner), torch.ones(32, 64, requires_grad=True)
    masks = []
    for _ in range(2):
        y = fast(x)
        mask = y.detach() / 6
        assert 0.3 < mask.mean() < 0.7
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        grad, pending = split.backward_input(y.sum(), None, x)
        pending.run()
        torch.testing.assert_close(grad, 6 * mask)
        torch.testing.assert_close(weight.grad, 6 * torch.ones(64, 32) @ mask)
        weight.grad = None
        masks.append(mask)
    assert not torch.equal(*masks)


def test_batch_norm_moves_its_buffers_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    reference, fast, x = twin(model)[0], compiled(model), torch.randn(2, 3, 6, 6)
    for _ in range(2):
        reference(x).square().sum().backward()
        split.backward_input(fast(x).square().sum())[1].run()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_inputs_mutated_and_views_returned() -> None:
    layer = nn.Linear(4, 4)

    def function(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        seen.add_(1)
        y = layer(x * seen)
        return y.view(2, -1), x.t()

    results = []
    for call in (compiled(function), function):
        torch.manual_seed(0)
        layer.zero_grad()
        x, seen = x_of(6, 4), torch.zeros(6, 4)
        y, view = call(x, seen)
        assert view.data_ptr() == x.data_ptr()
        outputs = [y.square().sum() + view.sum()]
        if call is function:
            grad = torch.autograd.grad(outputs, [x, *layer.parameters()])
            results.append((*grad, seen))
        else:
            grad, pending = split.backward_input(outputs, None, x)
            pending.run()
            results.append((grad, layer.weight.grad.clone(), layer.bias.grad.clone(), seen))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_grad_and_inference() -> None:
    model, x = Mlp(), torch.randn(5, 4)
    fast, expected = compiled(model), model(x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), expected)
    assert not fast(x).isnan().any()
    with pytest.raises(SplitError, match="no backward was compiled"):
        split.inspect(model)


def test_graph_breaks_and_other_shapes() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model = Broken()
    for rows in (5, 3, 7):
        pending = assert_compiled_equals_backward(model, x_of(rows, 4))
        assert len(pending.deferred) == 8
        model.zero_grad()
    assert len(split.inspect(model)) >= 2


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dynamic_shapes(inner: str) -> None:
    model = gpt(8, 1, heads=2)
    fast, reference = compiled(model, inner, dynamic=True), twin(model)[0]
    for rows, length in ((2, 3), (4, 5), (3, 7)):
        x = x_of(rows, length, 8)
        their_x = x.detach().clone().requires_grad_()
        reference(their_x).square().sum().backward()
        grad, pending = split.backward_input(fast(x).square().sum(), None, x)
        pending.run()
        torch.testing.assert_close(grad, their_x.grad, rtol=1e-4, atol=1e-5)
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model = gpt(16, 1)
    assert_compiled_equals_backward(model, x_of(2, 5, 16), call=call, rtol=2e-2, atol=2e-2)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_w_under_autocast_computes_as_it_was_compiled() -> None:
    model = Mlp()
    fast, reference, x = compiled(model), twin(model)[0], torch.randn(5, 4)
    reference(x).square().sum().backward()
    _, pending = split.backward_input(fast(x).square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        pending.run()
    assert_same_grads(model, reference)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_retain_graph_and_a_second_backward(inner: str) -> None:
    model = Mlp()
    fast, reference, x = compiled(model, inner), twin(model)[0], torch.randn(5, 4)
    for which in (fast, reference):
        which(x).sum().backward()
        y = which(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert_same_grads(model, reference)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gradients_share_no_memory(inner: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a + self.b

    model, x, g = Sum(), torch.zeros(3, requires_grad=True), torch.ones(3)
    grad, pending = split.backward_input(compiled(model, inner)(x), g, x)
    pending.run()
    pointers = {tensor.data_ptr() for tensor in (grad, model.a.grad, model.b.grad)}
    assert len(pointers) == 3
    assert g.data_ptr() not in pointers - {grad.data_ptr()}


def test_what_waits_is_freed_and_counted() -> None:
    model = Mlp(16)
    fast, x = compiled(model), x_of(50, 16)
    fast(x).sum().backward()
    y = fast(x)
    node = weakref.ref(y.grad_fn)
    _, pending = split.backward_input(y.sum(), None, x)
    (graphs,) = split.inspect(model)
    assert pending.nbytes == graphs.held_after_i
    del y
    gc.collect()
    assert node() is None
    pending.run()
    assert pending.nbytes == 0


def test_a_change_in_place_is_noticed() -> None:
    layer = nn.Linear(4, 4)
    fast, x = compiled(layer), torch.randn(5, 4)
    _, pending = split.backward_input(fast(x).sum())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(PendingError, match=r"must not be changed in place.* got a changed input of a compiled W"):
        pending.run()


def test_a_failed_backward_leaves_nothing_behind() -> None:
    model = Mlp()
    fast, reference, x = compiled(model), twin(model)[0], x_of(5, 4)

    def fail(grad: Tensor) -> None:
        raise ValueError("from a hook")

    between = fast(x)
    middle = between * 1
    middle.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        split.backward_input(middle.sum(), None, x)
    fast(x).square().sum().backward()
    reference(x.detach()).square().sum().backward()
    assert_same_grads(model, reference)


def test_a_backward_inside_a_compiled_node_is_an_ordinary_one() -> None:
    """A hook on the compiled node's output runs a backward of its own through the same compiled code."""
    model = Mlp()
    fast, reference, other = compiled(model), twin(model)[0], torch.randn(5, 4)
    x = x_of(5, 4)
    y = fast(x)

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            fast(other).sum().backward()

    y.register_hook(hook)
    _, pending = split.backward_input(y.square().sum(), None, x)
    reference(other).sum().backward()
    assert_same_grads(model, reference)
    pending.run()
    reference(x.detach()).square().sum().backward()
    assert_same_grads(model, reference)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": {"inner": "tvm"}}, r'"inner"\] must be "inductor" or "eager"; got \'tvm\''),
        ({"options": {"inner": "eager", "max_autotune": True}}, 'inner="eager" cannot take a mode or other options'),
        ({"options": {"no_such_setting": 1}}, "no_such_setting"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    from sternway.split.compiled._backend import sternway

    fast = torch.compile(nn.Linear(2, 2), backend=sternway, **options)
    with pytest.raises(Exception, match=message):
        fast(torch.ones(1, 2))


def test_without_a_compiler_there_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    from sternway.split.compiled import _backend

    monkeypatch.setattr(_backend.shutil, "which", lambda name: None)
    fast = torch.compile(nn.Linear(2, 2), backend=_backend.sternway)
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        fast(torch.ones(1, 2)).sum().backward()


def test_a_torch_that_does_not_say_what_is_overwritten_is_refused() -> None:
    """Inductor then overwrites saved tensors that W needs, and the gradients are silently wrong."""
    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace()
    with (
        tracing(context),
        pytest.raises(UnsupportedTorch, match=r"bw_donated_idxs .* got a SimpleNamespace without it"),
    ):
        forbid_donation()
