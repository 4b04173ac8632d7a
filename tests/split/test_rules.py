"""Each operation with a rule, each way a weight reaches one: equal to a plain backward, and the weight waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_split_equals_backward, names
from sternway import split
from sternway._torch import all_probes, operands, require
from sternway.errors import SplitError, UnsupportedTorch
from sternway.split._rules import RULES
from zoo.deferred import measure


class Holder(nn.Module):
    """Parameters of the given shapes, named a, b, c."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in zip("abc", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def _op(shapes: list[tuple[int, ...]], x: tuple[int, ...], call: Callable[..., Tensor]) -> tuple:
    return lambda: Holder(*shapes), x, call


ENDS = torch.tensor([2, 5, 8], dtype=torch.int32)  # of three groups of rows
FROZEN = nn.Parameter(torch.ones(2, 3), requires_grad=False)
OPERATIONS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), None),
    "linear 3-D": (lambda: nn.Linear(4, 3), (2, 5, 4), None),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 5, 4), None),
    "linear 4-D": (lambda: nn.Linear(4, 3), (2, 3, 5, 4), None),
    "mm": _op([(4, 3)], (5, 4), lambda m, x: x @ m.a),
    "mm on the left": _op([(3, 5)], (5, 4), lambda m, x: m.a @ x),
    "addmm": _op([(4, 3), (3,)], (5, 4), lambda m, x: torch.addmm(m.b, x, m.a, beta=0.5, alpha=2)),
    "addmm, full bias": _op([(4, 3), (5, 3)], (5, 4), lambda m, x: torch.addmm(m.b, x, m.a)),
    "addmm, transposed bias": _op([(4, 3), (3, 5)], (5, 4), lambda m, x: torch.addmm(m.b.t(), x, m.a)),
    "addmm, transposed square bias": _op([(4, 5), (5, 5)], (5, 4), lambda m, x: torch.addmm(m.b.t(), x, m.a)),
    "addmm, weight on the left": _op([(3, 5)], (5, 4), lambda m, x: torch.addmm(x[:3], m.a, x, alpha=3)),
    "bmm": _op([(2, 4, 3)], (2, 5, 4), lambda m, x: torch.bmm(x, m.a)),
    "bmm on the left": _op([(2, 3, 5)], (2, 5, 4), lambda m, x: torch.bmm(m.a, x)),
    "baddbmm": _op([(2, 4, 3), (3,)], (2, 5, 4), lambda m, x: torch.baddbmm(m.b, x, m.a, beta=3, alpha=0.5)),
    "baddbmm, transposed bias": _op([(2, 4, 3), (2, 3, 5)], (2, 5, 4), lambda m, x: torch.baddbmm(m.b.mT, x, m.a)),
    "matmul, stack by matrix": _op([(4, 3)], (2, 5, 4), lambda m, x: x @ m.a),
    "matmul, stack by stack": _op([(2, 1, 4, 3)], (2, 6, 5, 4), lambda m, x: x @ m.a),
    "matmul, matrix by stack": _op([(3, 5)], (2, 5, 4), lambda m, x: m.a @ x),
    "einsum": _op([(4, 2, 3)], (5, 4), lambda m, x: torch.einsum("ni,iho->nho", x, m.a)),
    "einsum, experts": _op([(6, 4, 3)], (5, 6, 4), lambda m, x: torch.einsum("nei,eio->neo", x, m.a)),
    "grouped mm": _op([(3, 4, 8)], (8, 4), lambda m, x: torch._grouped_mm(x, m.a, ENDS)),
    "grouped mm, transposed": _op([(3, 8, 4)], (8, 4), lambda m, x: torch._grouped_mm(x, m.a.mT, ENDS)),
    "grouped mm on the left": _op([(8, 8)], (8, 4), lambda m, x: torch._grouped_mm(m.a, x, ENDS)),
    "grouped mm of stacks": _op([(3, 4, 8)], (3, 8, 4), lambda m, x: torch._grouped_mm(x, m.a)),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3, bias=False), (6, 4), lambda m, x: m(x, torch.cos(x.new_ones(6, 5)))),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (2, 3, 9), None),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False), (2, 4, 9, 9), None),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), None),
    "conv2d, reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 6), None),
    "conv2d, no batch": (lambda: nn.Conv2d(3, 4, 3), (3, 6, 6), None),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5), None),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5), None),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3), None),
}
WEIGHTS = {
    "transposed": _op([(3, 4)], (5, 4), lambda m, x: x @ m.a.t()),
    "transposed stack": _op([(2, 3, 4)], (2, 5, 4), lambda m, x: x @ m.a.transpose(-1, -2)),
    "mT": _op([(2, 3, 4)], (2, 5, 4), lambda m, x: x @ m.a.mT),
    "permuted": _op([(3, 4)], (5, 4), lambda m, x: x @ m.a.permute(1, 0)),
    "viewed": _op([(12,)], (5, 4), lambda m, x: x @ m.a.view(4, 3)),
    "cast": _op([(4, 3)], (5, 4), lambda m, x: (x.double() @ m.a.double()).float()),
    "cast and transposed": _op([(3, 4)], (5, 4), lambda m, x: F.linear(x.double(), m.a.double()).float()),
    "expanded": _op([(4, 3)], (2, 5, 4), lambda m, x: torch.bmm(x, m.a.expand(2, 4, 3))),
    "sliced": _op([(4, 9)], (5, 4), lambda m, x: x @ m.a[:, 3:6]),
    "scaled": _op([(4, 3)], (5, 4), lambda m, x: x @ (m.a * 0.5).tanh()),
    "masked": _op([(4, 3)], (5, 4), lambda m, x: x @ (m.a * torch.eye(4)[:, :3])),
    "low rank": _op([(4, 3), (4, 2), (2, 3)], (5, 4), lambda m, x: x @ (m.a + m.b @ m.c)),
    "low rank, one side frozen": _op([(4, 3), (4, 2)], (5, 4), lambda m, x: x @ (m.a + m.b @ FROZEN)),
    "convolution kernel, scaled": _op([(4, 3, 3, 3)], (2, 3, 6, 6), lambda m, x: F.conv2d(x, m.a / m.a.norm())),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *WEIGHTS])
@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
def test_split_equals_backward(name: str, first_stage: bool) -> None:
    torch.manual_seed(0)
    make, shape, call = (OPERATIONS | WEIGHTS)[name]
    model = make()
    call = call or (lambda model, x: model(x))
    x = torch.randn(shape, requires_grad=not first_stage)
    pending = assert_split_equals_backward(model, x, call=lambda m, x: call(m, x).sin(), rtol=1e-4, atol=1e-5)
    assert names(model, pending.deferred) == {name for name, _ in model.named_parameters()}


def test_an_operation_without_a_rule_is_computed_in_i() -> None:
    """One kernel computes all the gradients of an LSTM layer, and none of them can be left out."""
    layer = nn.LSTM(4, 3)
    pending = assert_split_equals_backward(
        layer, torch.randn(5, 2, 4, requires_grad=True), call=lambda m, x: m(x)[0], rtol=1e-4, atol=1e-5
    )
    assert names(layer, pending.ready) == {name for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("layer", [nn.GRU(4, 3, 2), nn.RNN(4, 3), nn.LSTMCell(4, 3), nn.GRUCell(4, 3)])
def test_recurrent_layers_that_are_made_of_products(layer: nn.Module) -> None:
    shape = (2, 4) if isinstance(layer, nn.RNNCellBase) else (5, 2, 4)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        found = layer(x)
        return found[0] if isinstance(found, tuple) else found

    pending = assert_split_equals_backward(
        layer, torch.randn(shape, requires_grad=True), call=call, rtol=1e-4, atol=1e-5
    )
    assert names(layer, pending.deferred) == {name for name, _ in layer.named_parameters()}


def test_both_sides_of_a_bilinear_layer_are_activations() -> None:
    layer = nn.Bilinear(4, 4, 3)
    pending = assert_split_equals_backward(
        layer, torch.randn(5, 4, requires_grad=True), call=lambda m, x: m(x, x.sin())
    )
    assert names(layer, pending.deferred) == {"weight"}  # its bias is added apart


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"include_last_offset": True}, {"sparse": True}])
def test_embedding_bag(mode: str, options: dict) -> None:
    if mode == "max" and options.get("sparse"):
        options = {"scale_grad_by_freq": False}  # torch has no sparse maxima
    table = nn.EmbeddingBag(7, 3, mode=mode, **options)
    offsets = torch.tensor([0, 2, 2, 6])
    pending = assert_split_equals_backward(table, torch.randint(0, 7, (6,)), call=lambda m, ids: m(ids, offsets))
    assert names(table, pending.deferred) == {"weight"}
    assert table.weight.grad.is_sparse == options.get("sparse", False)


def test_weights_of_the_samples_in_an_embedding_bag_are_activations() -> None:
    table, ids = nn.EmbeddingBag(7, 3, mode="sum"), torch.randint(0, 7, (2, 4))
    share = torch.rand(2, 4, requires_grad=True)
    pending = assert_split_equals_backward(table, share, call=lambda m, share: m(ids, per_sample_weights=share))
    assert names(table, pending.deferred) == {"weight"}


class Scaled(nn.Module):
    """A frozen layer and trained vectors that scale what goes in and what comes out: IA3, VeRA, DoRA's magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x * self.before) * self.after


def test_vectors_that_scale_activations_do_not_wait() -> None:
    """They take no matrix product: of the operations that could wait, these are none."""
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(5, 4, requires_grad=True)
    pending = assert_split_equals_backward(model, x)
    assert not pending.deferred
    assert len(pending.ready) == 4
    deferral = measure(lambda: (model(x), [x]))
    assert deferral.plain == deferral.inputs


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.PReLU()])
def test_small_weight_gradients_are_computed_in_i(layer: nn.Module) -> None:
    pending = assert_split_equals_backward(layer, torch.randn(5, 4, requires_grad=True))
    assert names(layer, pending.ready) == {name for name, _ in layer.named_parameters()}
    assert not pending.deferred


def test_a_bias_alone_is_not_worth_holding_a_gradient_for() -> None:
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    pending = assert_split_equals_backward(layer, torch.randn(5, 4, requires_grad=True))
    assert names(layer, pending.ready) == {"bias"}


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding(options: dict) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3, **options)
    pending = assert_split_equals_backward(table, torch.randint(0, 7, (4, 5)))
    assert names(table, pending.deferred) == {"weight"}
    assert table.weight.grad.is_sparse == options.get("sparse", False)


def test_complex_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a

    model = Model()
    pending = assert_split_equals_backward(model, torch.randn(5, 4, dtype=torch.complex64, requires_grad=True))
    assert names(model, pending.deferred) == {"a"}


class TestTaughtRule:
    """A user's own node kind, with a rule of its own."""

    class Scale(torch.autograd.Function):
        calls: list[tuple[bool, ...]] = []  # noqa: RUF012 - a spy, cleared by the test

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            TestTaughtRule.Scale.calls.append(ctx.needs_input_grad)
            return grad * weight, (grad * x).sum(0) if ctx.needs_input_grad[1] else None

    def test_makes_its_weight_wait(self) -> None:
        call = lambda m, x: self.Scale.apply(x, m.a)  # noqa: E731
        model, x = Holder((4,)), torch.randn(5, 4, requires_grad=True)
        assert assert_split_equals_backward(model, x, call=call).ready
        try:
            split.rule("ScaleBackward", 1)(
                lambda node: split.Later(lambda grad, x: (grad * x).sum(0), node.saved_tensors[0])
            )
            pending = assert_split_equals_backward(Holder((4,)), x, call=call)
        finally:
            del RULES["ScaleBackward"]
        assert len(pending.deferred) == 1

    @pytest.mark.parametrize(
        ("kind", "operand", "role", "message"),
        [
            ("", 0, "weight", "must name a node kind; got ''"),
            ("X", -1, "weight", "operand must be an index .* got -1"),
            ("X", 0, "rider", "role must be .* got 'rider'"),
        ],
    )
    def test_bad_arguments(self, kind: str, operand: int, role: str, message: str) -> None:
        with pytest.raises(SplitError, match=message):
            split.rule(kind, operand, role=role)


def test_product_takes_one_side() -> None:
    with pytest.raises(TypeError, match="one side"):
        split.Product()


def test_every_rule_of_ours_is_for_a_node_that_is_probed() -> None:
    """A rule for a kind that torch has renamed would defer nothing, and nobody would be told."""
    kinds = {probe.name.split(":")[0] for probe in all_probes() if "split" in probe.features}
    assert set(RULES) <= kinds


def test_a_rule_for_a_node_that_torch_has_renamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands.Bmm, "name", "StackedMmBackward0")
    require.cache_clear()
    y = nn.Linear(2, 2)(torch.ones(1, 2)).sum()
    with pytest.raises(UnsupportedTorch, match=r"BmmBackward0: .* must do what split need"):
        split.backward_input(y)
    with pytest.raises(UnsupportedTorch, match="BmmBackward0"):  # again, and nothing was computed
        split.preview(y)
    monkeypatch.undo()
    split.backward_input(y)[1].run()
