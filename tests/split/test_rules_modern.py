"""Operations that newer models are made of: each equal to a plain backward, and what waits is said for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning import learning  # noqa: F401 - a fixture: every Function may be tried here
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_split_equals_backward, names
from sternway import split
from sternway.errors import SplitError

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Weights(nn.Module):
    """Parameters of the given shapes, named a, b, c."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in zip("abc", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))


def check(model: nn.Module, x: Tensor, call: Callable[..., Tensor], waits: set[str], **options: Any) -> None:
    """Equal to a plain backward; these parameters wait, and all others are ready."""
    pending = assert_split_equals_backward(model, x, call=call, **{**TOLERANCE, **options})
    assert names(model, pending.deferred) == waits
    assert names(model, pending.ready) == {name for name, _ in model.named_parameters()} - waits


EINSUMS = [  # the equation, the activation's shape, the weight's, and whether it takes a product
    ("ni,iho->nho", (5, 4), (4, 2, 3), True),
    ("nei,eio->neo", (5, 6, 4), (6, 4, 3), True),
    ("bhid,hde->bhie", (2, 3, 6, 4), (3, 4, 5), True),
    ("...i,io->...o", (2, 5, 4), (4, 3), True),
    ("bnd,vd->bnv", (2, 3, 4), (7, 4), True),
    ("nchw,oc->nohw", (2, 3, 4, 4), (5, 3), True),
    ("bij,bkj->bik", (2, 3, 4), (2, 5, 4), True),
    ("ij,jk->ki", (3, 4), (4, 5), True),
    ("abc,cd->ab", (2, 3, 4), (4, 6), True),  # a sum over d before the product
    ("ij,j->i", (3, 4), (4,), True),
    ("i,ij->j", (4,), (4, 3), True),
    ("ij,ij->", (3, 4), (3, 4), True),
    ("i,i->", (4,), (4,), True),
    ("i,j->ij", (4,), (3,), False),
    ("ij,ij->ij", (3, 4), (3, 4), False),
    ("ij,j->ij", (3, 4), (4,), False),
    ("ii,i->i", (3, 3), (3,), False),
]


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize(("equation", "x", "weight", "waits"), EINSUMS, ids=[each[0] for each in EINSUMS])
def test_einsum(equation: str, x: tuple[int, ...], weight: tuple[int, ...], waits: bool, weight_first: bool) -> None:
    (left, right), out = equation.partition("->")[0].split(","), equation.partition("->")[2]

    def call(model: nn.Module, x: Tensor) -> Tensor:
        if weight_first:
            return torch.einsum(f"{right},{left}->{out}", model.a, x).sin()
        return torch.einsum(equation, x, model.a).sin()

    check(Weights(weight), torch.randn(x, requires_grad=True), call, {"a"} if waits else set())


def test_einsum_of_three() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return torch.einsum("bi,oij,bj->bo", x, model.a, x.sin())

    check(Weights((3, 4, 4)), torch.randn(5, 4, requires_grad=True), call, {"a"})


VECTORS = {
    "mv": ([(3, 4)], (4,), lambda m, x: torch.mv(m.a, x)),
    "mv, a vector": ([(4,)], (3, 4), lambda m, x: torch.mv(x, m.a)),
    "addmv": ([(3, 4), (3,)], (4,), lambda m, x: torch.addmv(m.b, m.a, x, alpha=2, beta=3)),
    "addmv, a vector": ([(4,), (3,)], (3, 4), lambda m, x: torch.addmv(m.b, x, m.a, alpha=2)),
    "addbmm": ([(2, 4, 3), (5, 3)], (2, 5, 4), lambda m, x: torch.addbmm(m.b, x, m.a, alpha=2, beta=3)),
    "addbmm on the left": ([(2, 3, 5)], (2, 5, 4), lambda m, x: torch.addbmm(x.new_zeros(3, 4), m.a, x)),
    "tensordot": ([(4, 5, 3)], (2, 4, 5), lambda m, x: torch.tensordot(x, m.a, 2)),
    "inner": ([(3, 4)], (5, 4), lambda m, x: torch.inner(x, m.a)),
    "multi_dot": ([(4, 3), (3, 2)], (5, 4), lambda m, x: torch.linalg.multi_dot([x, m.a, m.b])),
}


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", VECTORS)
def test_products(name: str, dtype: torch.dtype, first_stage: bool) -> None:
    shapes, shape, call = VECTORS[name]
    model = Weights(*shapes, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=not first_stage)
    check(model, x, lambda m, x: call(m, x).sin(), {name for name, _ in model.named_parameters()})


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="a torch without it")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
                pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
            ],
        ),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_groups(device: str, transposed: bool) -> None:
    ends = torch.tensor([2, 5, 16], dtype=torch.int32, device=device)
    model = Weights((3, 32, 16) if not transposed else (3, 16, 32)).to(device, torch.bfloat16)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return F.grouped_mm(x, model.a.mT if transposed else model.a, offs=ends).float().sin()

    check(model, x, call, {"a"}, rtol=5e-2, atol=5e-2)


LOSSES = [{}, {"reduction": "sum"}]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="a torch without it")
@pytest.mark.parametrize("options", LOSSES)
def test_a_linear_layer_and_its_loss(options: dict[str, Any]) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, model.a, torch.arange(6), **options)

    check(Weights((9, 4)), torch.randn(6, 4, requires_grad=True), call, {"a"})


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="a torch without it")
@pytest.mark.parametrize("options", LOSSES)
def test_the_same_in_chunks_has_its_gradients_from_the_forward(options: dict[str, Any]) -> None:
    """Its backward scales in place what it saved, so that it is called once; the split notices."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        chunks = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, model.a, torch.arange(6), linear_bias=model.b, options=chunks, **options) * 2

    check(Weights((9, 4), (9,)), torch.randn(6, 4, requires_grad=True), call, set(), rounds=3)
    assert [row.verdict for row in split.kinds()] == ["whole"]


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (1, 3, 5, 5), (5, 5)])
def test_attention_with_a_trained_bias(shape: tuple[int, ...]) -> None:
    """The bias is added to a matrix that I computes anyway; the products around it wait."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x @ model.b, x @ model.c, x.sin(), attn_mask=model.a)

    check(Weights(shape, (8, 8), (8, 8)), torch.randn(2, 3, 5, 8, requires_grad=True), call, {"b", "c"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # cuBLAS says once that it made a context
def test_attention_with_a_trained_bias_in_one_kernel() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x @ model.b, x @ model.c, x.sin(), attn_mask=model.a)

    model = Weights((1, 3, 16, 16), (32, 32), (32, 32)).cuda()
    x = torch.randn(2, 3, 16, 32, device="cuda", requires_grad=True)
    check(model, x, call, {"b", "c"}, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # cuDNN says that weights were copied
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_cudnn_are_one_kernel(kind: type[nn.RNNBase]) -> None:
    layer = kind(16, 8, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(5, 2, 16, device="cuda", requires_grad=True)
    check(layer, x, lambda m, x: m(x)[0], set(), rtol=1e-3, atol=1e-3)


def test_a_trained_scale_of_a_quantized_weight() -> None:
    """Only the scales are trained; the product's gradient waits, and goes through the scaling in W."""
    whole = torch.randint(-100, 100, (16, 32), dtype=torch.int8)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, whole.float() * model.a / 100)

    check(Weights((16, 1)), torch.randn(4, 32, requires_grad=True), call, {"a"})


@pytest.mark.parametrize("name", ["_weight_int8pack_mm", "_scaled_mm"])
def test_what_torch_cannot_differentiate_raises_as_in_torch(name: str) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    if name == "_scaled_mm":
        low, scale = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.ones(())
        y = torch._scaled_mm(x.to(torch.float8_e4m3fn), low.t(), scale, scale, out_dtype=torch.bfloat16)
    else:
        whole, scales = torch.randint(-9, 9, (16, 32), dtype=torch.int8), torch.rand(16, dtype=torch.bfloat16)
        y = torch._weight_int8pack_mm(x.to(torch.bfloat16), whole, scales)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        split.backward_input(y.float().sum(), None, x)


class Named(Tensor):
    """A subclass that passes every function on."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def test_linear_with_a_weight_of_a_subclass() -> None:
    torch.manual_seed(0)
    plain, x = nn.Parameter(torch.randn(4, 8)), torch.randn(5, 8, requires_grad=True)
    named = nn.Parameter(plain.detach().clone().as_subclass(Named))
    for _ in range(2):
        F.linear(x, plain).sin().sum().backward()
        grad, pending = split.backward_input(F.linear(x, named).sin().sum(), None, x)
        pending.run()
        torch.testing.assert_close(torch.Tensor(grad), x.grad)
        x.grad = None
    torch.testing.assert_close(named.grad.as_subclass(Tensor), plain.grad)


@pytest.mark.filterwarnings("default")  # nested tensors are a prototype
def test_linear_on_a_nested_tensor_is_one_node_which_is_ready() -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5]))
        return layer(nested).values()

    check(nn.Linear(8, 4), torch.randn(5, 8, requires_grad=True), call, set())


@pytest.mark.parametrize("trained", [False, True])
def test_embedding_bag_with_weights(trained: bool) -> None:
    """The table waits; weights of the samples that are trained wait too, for nothing else lies below."""
    ids, offsets = torch.tensor([0, 1, 1, 3, 6, 2]), torch.tensor([0, 2, 2, 5])
    model = Weights((7, 3), (6,)) if trained else Weights((7, 3))

    def call(model: nn.Module, x: Tensor) -> Tensor:
        share = model.b if trained else torch.ones(6)
        return F.embedding_bag(ids, model.a, offsets, mode="sum", per_sample_weights=share) + x

    check(model, torch.randn(4, 3, requires_grad=True), call, {name for name, _ in model.named_parameters()})


def test_a_rule_that_is_refused_says_so() -> None:
    with pytest.raises(SplitError, match="operand must be an index"):
        split.rule("MvBackward0", -2)
