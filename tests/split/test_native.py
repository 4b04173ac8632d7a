"""The extension in C++: it does what Python does, bit for bit, and leaves to Python what is unusual."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import MODELS, convnet, gpt
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from sternway import saved, split
from sternway._torch import native
from sternway.errors import PendingError, SplitError, UnsupportedTorch
from sternway.pipeline import LocalTransport, Pipeline
from sternway.split import Pending, _accelerate
from sternway.split.eager._native import EXTENSION, NativeWork


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    try:
        split.accelerate()
    except UnsupportedTorch as error:
        pytest.skip(str(error))
    yield
    split.accelerate(False)


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))


def begin(model: nn.Module, call: Callable[..., Tensor] | None = None, **options: Any) -> tuple[Tensor, Pending]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    y = (call or model)(x)
    grad, pending = split.backward_input(y.square().sum(), None, x, **options)
    return grad, pending


def grads_of(model: nn.Module, **options: Any) -> list[Tensor]:
    grad, pending = begin(model, **options)
    pending.run()
    return [grad, *(parameter.grad.clone() for parameter in model.parameters())]


def is_used(pending: Pending) -> bool:
    return any(isinstance(work, NativeWork) for work in pending._work)


def assert_bitwise(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=0)


@pytest.mark.parametrize("own_thread", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equals_python_in_every_bit(name: str, checkpointed: bool, own_thread: bool) -> None:
    make, shape = MODELS[name]
    model = make()
    found = []
    for on in (True, False):
        split.accelerate(on)
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.randn(shape, requires_grad=True)
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in range(2):  # the second adds to the first
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            grad, pending = split.backward_input(y.square().sum(), None, x, own_thread=own_thread)
            pending.run()
        model.load_state_dict(state, strict=False)
        found.append([grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_bitwise(*found)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "groups, strides, dilation": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9, 8)),
    "three dimensions": (lambda: nn.Conv3d(4, 3, 2, padding=1), (2, 4, 5, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 4)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (2, 4, 6, 5)),
    "no batch": (lambda: nn.Conv2d(4, 6, 1), (4, 6, 5)),
    "double": (lambda: nn.Conv2d(4, 6, 3).double(), (2, 4, 6, 5)),
    "channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 6, 5)),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_every_kind(name: str, checkpointed: bool) -> None:
    make, shape = CONVOLUTIONS[name]
    layer = make()
    dtype = next(layer.parameters()).dtype
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=dtype).requires_grad_()

    def loss() -> Tensor:
        y = checkpoint(layer, x.sin(), use_reentrant=False) if checkpointed else layer(x.sin())
        return y.abs().square().sum()

    leaves = [x, *layer.parameters()]
    expected = list(torch.autograd.grad(loss(), leaves))
    expected[1:] = [grad + 1 for grad in expected[1:]]
    for first in (True, False):  # a first .grad, which Python makes, and a later one
        found = []
        for on in (True, False):
            split.accelerate(on)
            for parameter in layer.parameters():
                parameter.grad = None if first else torch.ones_like(parameter)
            grad, pending = split.backward_input(loss(), None, x)
            assert is_used(pending) is on
            pending.run()
            found.append([grad, *(p.grad + 1 if first else p.grad for p in layer.parameters())])
        assert_bitwise(*found)
        for got, want in zip(found[0], expected, strict=True):
            torch.testing.assert_close(got, want)


def test_a_convolution_may_be_packed_and_may_not_be_changed() -> None:
    layer = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    expected = torch.autograd.grad(layer(x * 1).sum(), list(layer.parameters()))
    _, pending = split.backward_input(layer(x * 1).sum(), None, x)
    assert is_used(pending)
    pending.pack(saved.compress("bf16"))
    pending.run()
    for parameter, want in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=0.05, atol=0.1)
    for change in ("input", "weight"):
        h = x * 1
        _, pending = split.backward_input(layer(h).sum(), None, x)
        assert is_used(pending)
        with torch.no_grad():
            (h if change == "input" else layer.weight).add_(1)
        with pytest.raises(PendingError, match="must not be changed in place between I and W"):
            pending.run()


@pytest.mark.parametrize("make", [lambda: gpt(16, 2), lambda: convnet(4, 2)])
def test_it_is_used_and_holds_as_much(make: Callable[[], nn.Module]) -> None:
    model = make()
    shape = (2, 3, 5, 5) if isinstance(model[0], nn.Conv2d) else (2, 5, 16)
    held = []
    for on in (True, False):
        split.accelerate(on)
        x = torch.randn(shape, requires_grad=True)
        _, pending = split.backward_input(model(x).sum(), None, x)
        assert is_used(pending) is on
        held.append((pending.nbytes, set(pending.deferred), set(pending.ready)))
        pending.run()
    assert held[0] == held[1]


class Tokens(nn.Module):
    """Two embeddings, of which the second is added to data, and a product with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Embedding(7, 4), nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.one(x) + self.two(x % 3))
        return y


class Frozen(nn.Module):
    """Low-rank products beside a frozen weight, and with it: ``x (W + A B)``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_merged:
            return x @ (self.weight + self.a @ self.b)
        return x @ self.weight + x @ self.a @ self.b


FIRST_STAGES: dict[str, Callable[[], nn.Module]] = {
    "products": linears,
    "a product alone": lambda: nn.Linear(4, 4),
    "convolutions": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Conv1d(3, 2, 2)),
    "embeddings": Tokens,
    "low rank": Frozen,
}


@pytest.mark.parametrize("name", FIRST_STAGES)
def test_a_first_stage_has_no_input_to_ask_for(name: str) -> None:
    torch.manual_seed(0)
    model = FIRST_STAGES[name]()
    x = torch.randint(7, (3, 4)) if isinstance(model, Tokens) else torch.randn(3, 4)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    found, held = [], []
    for on in (True, False):
        split.accelerate(on)
        model.zero_grad()
        loss = model(x).square().sum()
        none, pending = split.backward_input(loss)
        assert none == ()
        assert is_used(pending) is on
        held.append((pending.nbytes, set(pending.deferred), set(pending.ready)))
        with pytest.raises((SplitError, RuntimeError), match="a second time"):
            split.backward_input(loss)
        pending.run()
        found.append([parameter.grad for parameter in wanted])
    assert held[0] == held[1]
    assert_bitwise(*found)
    for got, want in zip(found[0], expected, strict=True):
        torch.testing.assert_close(got, want)


def test_weights_made_of_weights_are_left_to_python() -> None:
    model = Frozen()
    model.is_merged = True
    x = torch.randn(3, 4)
    _, pending = split.backward_input(model(x).sum())
    assert not is_used(pending)
    pending.run()
    expected = torch.autograd.grad(model(x).sum(), [model.a, model.b])
    assert_bitwise([model.a.grad, model.b.grad], list(expected))


def test_an_edge_may_stand_for_an_output() -> None:
    model, x = linears(), torch.randn(3, 4, requires_grad=True)
    grads = torch.randn(3, 4)
    expected = list(torch.autograd.grad(model(x), [x, *model.parameters()], grads))
    y = model(x)
    edge, freed = get_gradient_edge(y), weakref.ref(y)
    del y
    assert freed() is None
    grad, pending = split.backward_input(edge, grads, x)
    assert is_used(pending)
    pending.run()
    assert_bitwise([grad, *(parameter.grad for parameter in model.parameters())], expected)


def test_every_stage_of_a_pipeline_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    run = Pending.run
    monkeypatch.setattr(Pending, "run", lambda self: (used.append(is_used(self)), run(self)))
    model = gpt(16, 4, heads=2)
    x, target = torch.randn(8, 5, 16), torch.randn(8, 5, 16)
    nn.functional.mse_loss(model(x), target).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    pipe = Pipeline(
        model,
        schedule="zb-h1",
        n_microbatches=4,
        ranks=4,
        loss_fn=nn.functional.mse_loss,
        transport=LocalTransport(),
    )
    pipe.step(x, target=target)
    assert used == [True] * 16
    for parameter, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want)


def test_a_hook_in_the_graph_leaves_it_to_python() -> None:
    seen: list[Any] = []

    def call(x: Tensor) -> Tensor:
        h = model[0](x)
        h.register_hook(lambda grad: seen.append(grad.shape))
        return model[1:](h)

    model = linears()
    _, pending = begin(model, call)
    assert not is_used(pending)
    pending.run()
    assert len(seen) == 1


def test_a_hook_that_was_removed_does_not() -> None:
    model = linears()
    x = torch.randn(3, 4, requires_grad=True)
    h = model[0](x)
    h.register_hook(lambda grad: None).remove()
    model[0].weight.register_hook(lambda grad: None).remove()
    _, pending = split.backward_input(model[1:](h).sum(), None, x)
    assert is_used(pending)
    pending.run()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("when", ["before F", "between I and W"])
def test_hooks_of_parameters_run_once_in_w(register: str, when: str) -> None:
    model, seen = linears(), []

    def add() -> None:
        for parameter in model.parameters():
            getattr(parameter, register)(lambda value: seen.append(value.shape))

    if when == "before F":
        add()
    _, pending = begin(model)
    if when != "before F":
        add()
    assert seen == []
    pending.run()
    assert sorted(seen) == sorted(parameter.shape for parameter in model.parameters())


def test_a_first_grad_a_frozen_parameter_and_a_packed_pending() -> None:
    model = linears()
    expected = grads_of(model)
    _, pending = begin(model)
    pending.pack(saved.compress("bf16"))
    pending.run()
    for got, want in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(got.grad, want, rtol=0.1, atol=0.1)
    _, pending = begin(model)
    model[0].weight.grad = None
    model[3].weight.requires_grad_(False)
    pending.run()
    torch.testing.assert_close(model[0].weight.grad, expected[1] - 1)
    assert torch.equal(model[3].weight.grad, torch.ones_like(model[3].weight))


def test_a_tied_weight() -> None:
    layer = nn.Linear(4, 4)
    ours = grads_of(nn.Sequential(layer, nn.Tanh(), layer))
    split.accelerate(False)
    assert_bitwise(ours, grads_of(nn.Sequential(layer, nn.Tanh(), layer)))


def test_a_table_that_is_also_a_products_weight_is_left_to_python() -> None:
    """Python would add to it in another order: the table's gradient before the product's."""
    torch.manual_seed(0)
    table, layer, tokens = nn.Embedding(33, 32), nn.Linear(32, 32), torch.randint(33, (50,))
    before, found = torch.randn(33, 32), []
    for on in (True, False):
        split.accelerate(on)
        split.forward_begins()
        layer.zero_grad()
        table.weight.grad = before.clone()
        h = layer(table(tokens)).tanh()
        _, pending = split.backward_input((h @ table.weight.t()).square().sum())
        assert not is_used(pending)
        pending.run()
        found.append([table.weight.grad, layer.weight.grad])
    assert_bitwise(*found)


def test_a_packed_pending_runs_hooks_in_the_same_order() -> None:
    orders = []
    for on in (True, False):
        split.accelerate(on)
        model, seen = linears(), list[str]()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        split.forward_begins()
        for pack in (False, True):
            _, pending = begin(model)
            if pack:
                pending.pack(saved.compress("bf16"))
            pending.run()
        half = len(seen) // 2
        assert seen[:half] == seen[half:]
        orders.append(seen)
    assert orders[0] == orders[1]


def test_a_rule_of_the_users_takes_the_place_of_ours() -> None:
    from sternway.split._rules import RULES

    known, called = dict(RULES), []
    begin(linears())[1].run()
    try:

        @split.rule("AddmmBackward0", 2)
        def _own(node: Any) -> split.Product:
            called.append(node)
            return split.Product(left=node._saved_mat1)

        begin(linears())[1].run()
    finally:
        RULES.clear()
        RULES.update(known)
    assert len(called) == 1


def test_a_change_between_i_and_w_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    h = x * 1
    _, pending = split.backward_input(layer(h).sum(), None, x)
    assert is_used(pending)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(PendingError, match="must not be changed in place between I and W"):
        pending.run()


def test_a_graph_is_split_once_and_freed() -> None:
    model = linears()
    x = torch.randn(3, 4, requires_grad=True)
    h = model[0](x)
    gone = weakref.ref(h)
    loss = model[1:](h).sum()
    del h
    assert gone() is not None  # a node saved it
    _, pending = split.backward_input(loss, None, x)
    assert is_used(pending)
    with pytest.raises(SplitError, match="a second time"):
        split.backward_input(loss, None, x)
    assert gone() is None
    pending.run()


def test_what_lies_below_is_freed_though_python_reads_some_cuts() -> None:
    """A bilinear layer's cut is read in Python; below the input is a graph that has not run."""
    below, bilinear, layer = nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.Linear(4, 4)
    factor = torch.randn(3, 4)
    gone = weakref.ref(factor)
    h = below(torch.randn(3, 4)) * factor
    y = layer(bilinear(h, h.detach()))
    _, pending = split.backward_input(y, torch.ones(3, 4), h)
    assert is_used(pending)
    del factor, h, y
    assert gone() is None


def test_the_nodes_that_end_a_first_stage_are_freed() -> None:
    """I does not run them, so that they keep what they saved, though it may be packed for W."""
    model, x = linears(), torch.randn(3, 4)
    gone = weakref.ref(x)
    _, pending = split.backward_input(model(x).sum())
    assert is_used(pending)
    del x
    assert gone() is None


def test_a_hook_that_an_unpack_hook_puts_on_an_activation() -> None:
    """It runs in I before the cut whose gradient it changes."""

    def begin_late(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        h = first(x)
        k = second(h)

        def unpack(packed: Tensor) -> Tensor:
            h.register_hook(lambda grad: 2 * grad)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return k.exp()

    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    leaves = [x, *first.parameters(), *second.parameters()]
    expected = torch.autograd.grad(begin_late(first, second, x).sum(), leaves)
    grad, pending = split.backward_input(begin_late(first, second, x).sum(), None, x)
    assert is_used(pending)
    pending.run()
    torch.testing.assert_close([grad, *(leaf.grad for leaf in leaves[1:])], list(expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch reads it as it traces
def test_a_backward_that_dynamo_compiles_is_left_to_python() -> None:
    from torch._dynamo import compiled_autograd

    model = linears()
    expected = grads_of(model)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        grad, pending = begin(model)
        assert not is_used(pending)
        pending.run()
    torch.testing.assert_close([grad, *(parameter.grad for parameter in model.parameters())], expected)


def test_an_error_in_i_leaves_no_hook_behind() -> None:
    layer, fails = nn.Linear(4, 4), []

    def call(x: Tensor) -> Tensor:
        if fails:
            raise ValueError("on purpose")
        return layer(x).exp()

    x = torch.randn(3, 4, requires_grad=True)
    y = checkpoint(call, x, use_reentrant=False)
    fails.append(True)
    with pytest.raises(ValueError, match="on purpose"):
        split.backward_input(y, torch.ones(3, 4), x)
    fails.clear()
    grad, pending = split.backward_input(y, torch.ones(3, 4), x)
    assert is_used(pending)
    pending.run()
    expected = torch.autograd.grad(call(x), [x, layer.weight, layer.bias], torch.ones(3, 4))
    assert_bitwise([grad, layer.weight.grad, layer.bias.grad], list(expected))


def test_it_is_tried_apart_from_what_the_caller_has_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXTENSION, "was_tried", False)
    with torch.no_grad(), torch.device("meta"):
        split.accelerate()
    assert EXTENSION.is_on
    assert EXTENSION.was_tried


def test_a_trial_that_fails_leaves_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no memory")

    split.accelerate(False)
    monkeypatch.setattr(EXTENSION, "was_tried", False)
    monkeypatch.setattr(_accelerate, "_equals_autograd", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        split.accelerate()
    assert not EXTENSION.is_on
    monkeypatch.setattr(_accelerate, "_equals_autograd", lambda: False)
    with pytest.raises(UnsupportedTorch, match="must split a small graph as autograd does"):
        split.accelerate()
    assert not EXTENSION.is_on


def test_no_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(UnsupportedTorch, match=r"must be able to build an extension.*Fix: install a C\+\+ compiler"):
        native.load_extension()
    assert not list(tmp_path.rglob("*.so"))
