"""Every policy that loses nothing gives the gradients of keeping, bit for bit, on every model of the split's tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, gpt
from saved_steps import assert_equal, grads_of, moving
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sternway import saved
from sternway.errors import SavedError

Make = Callable[[Path], list[AbstractContextManager[Any]]]
POLICIES: dict[str, Make] = {
    "disk": lambda path: [saved.offload(to="disk", directory=path, min_bytes=0)],
    "disk, small buffer": lambda path: [
        saved.offload(to="disk", directory=path, min_bytes=0, buffer=2000, prefetch=3000)
    ],
    "disk, lossless": lambda path: [
        saved.offload(to="disk", directory=path, min_bytes=0, buffer=2000),
        saved.compress("lossless"),
    ],
    "disk, auto": lambda path: [saved.offload(to="disk", directory=path, min_bytes=0, budget="auto")],
    "moved": lambda _: [moving()],
    "moved, nothing ahead": lambda _: [moving(prefetch=0, window=0)],
    "moved, a budget": lambda _: [moving(budget=10_000, prefetch=4000, window=2000)],
    "moved, half": lambda _: [moving(budget=0.5)],
    "moved, auto": lambda _: [moving(budget="auto")],
    "mutable": lambda _: [saved.mutable()],
    "mutable, moved": lambda _: [saved.mutable(), moving(window=0)],
    "keep": lambda _: [saved.keep()],
    "moved but for some": lambda _: [moving(), saved.keep(where=["0", "*.norm*"])],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_keeping(name: str, policy: str, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    expected = grads_of(model, x)
    policies = POLICIES[policy](tmp_path)
    for _ in range(4):  # to be recorded, measured twice, planned and prefetched
        assert_equal(grads_of(model, x, *policies), expected)
    assert list(tmp_path.iterdir()) == []


def test_weights_stay_and_shared_storages_go_once() -> None:
    model, x = gpt(64, 2), torch.randn(2, 16, 64)
    policy = moving()
    with policy as report:
        loss = model(x).sum()
    loss.backward()
    weights = sum(p.nbytes for p in model.parameters() if p.ndim > 1)
    assert report.skipped["parameter"] >= weights
    assert report.moved_bytes + report.skipped["parameter"] == report.packed_bytes
    # q, k and v are views of one storage; the attention's result is saved by it and by the product after it
    assert report.deduplicated_bytes == 2 * 3 * x.nbytes


class Tables(nn.Module):
    """Parameters and buffers used through views, frozen or not."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.frozen.t()) * self.table[0]) @ self.weight[:, :8].t() * self.table.detach()[1]


def test_buffers_and_frozen_parameters_stay_too() -> None:
    model, x = Tables(), torch.randn(4, 8)
    with moving() as report:
        loss = model(x.requires_grad_()).sum()
    loss.backward()
    assert report.moved_bytes == 4 * 8 * 4  # what the last product multiplies with
    with moving(model=model) as report:
        loss = (x @ model.table.detach()).sum()  # outside any module: known because the model is
    assert report.moved_bytes == 0


def test_a_small_part_of_a_large_storage_goes_alone() -> None:
    table = torch.randn(1000, 8)
    x = torch.randn(8, requires_grad=True)
    with moving() as report:
        loss = (x * table[3]).sum()
    loss.backward()
    assert report.moved_bytes == 32
    assert torch.equal(x.grad, table[3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda z: (z.conj() * z).real.sum(),
        lambda z: torch.view_as_real(z.conj() * 2).square().sum(),
        lambda z: (z.imag * z.conj().imag).sum(),
    ],
    ids=["conjugate", "view as real", "negative view"],
)
def test_conjugates_and_negatives(use: Callable[[Tensor], Tensor]) -> None:
    def grad(*policies: AbstractContextManager[Any]) -> Tensor:
        torch.manual_seed(0)
        z = torch.randn(5, dtype=torch.complex64, requires_grad=True)
        if policies:
            with policies[0]:
                loss = use(z * 1)
        else:
            loss = use(z * 1)
        loss.backward()
        assert z.grad is not None
        return z.grad

    assert torch.equal(grad(moving()), grad())


def test_sparse_and_empty_tensors_are_left_alone() -> None:
    indices = torch.eye(4).to_sparse()
    x = torch.randn(4, 4, requires_grad=True)
    with moving() as report:
        loss = torch.sparse.mm(indices, x).sum() + x[:0].exp().sum()
    loss.backward()
    assert torch.equal(x.grad, torch.ones(4, 4))  # type: ignore[arg-type]
    assert "layout" in report.skipped


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_torch_func_computes_with_is_left_alone() -> None:
    layer = nn.Linear(4, 4)

    def step(*policies: AbstractContextManager[Any]) -> Tensor:
        x = torch.ones(3, 4, requires_grad=True)
        with policies[0] if policies else nullcontext():
            tangent = torch.func.jvp(lambda x: layer(x).tanh(), (x,), (torch.ones(3, 4),))[1]
        return torch.autograd.grad(tangent.sum(), x)[0]

    for policy in (moving(), saved.mutable()):
        assert torch.equal(step(policy), step())


def test_autocast() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)

    def grads(*policies: AbstractContextManager[Any]) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            return grads_of(model, x, *policies)

    assert_equal(grads(moving()), grads())


# Checkpoints


def _checkpointed(model: nn.Module, x: Tensor, context_fn: Any = None) -> Tensor:
    options = {} if context_fn is None else {"context_fn": context_fn}
    for block in model:
        x = checkpoint(block, x, use_reentrant=False, **options)
    return x


class Checkpointed(nn.Module):
    def __init__(self, blocks: nn.Module, context_fn: Any = None) -> None:
        super().__init__()
        self.blocks, self.context_fn = blocks, context_fn

    def forward(self, x: Tensor) -> Tensor:
        return _checkpointed(self.blocks, x, self.context_fn)


def test_a_checkpoints_inputs_are_moved() -> None:
    blocks, x = gpt(16, 3), torch.randn(2, 5, 16)
    expected = grads_of(blocks, x)
    with moving() as report:
        found = grads_of(Checkpointed(blocks), x)
    assert_equal(found, expected)
    assert report.moved_bytes >= 2 * x.nbytes  # the input of the first block is a leaf


OPS = [torch.ops.aten.addmm.default]


@pytest.mark.parametrize("keep", [OPS, lambda context, operation, *args, **kwargs: operation in OPS])
def test_a_selective_checkpoint_keeps_through_the_policies(keep: Any) -> None:
    blocks, x = gpt(16, 2), torch.randn(2, 5, 16)
    expected = grads_of(Checkpointed(blocks, lambda: create_selective_checkpoint_contexts(OPS)), x)
    policy = moving()
    with policy as report:
        found = grads_of(Checkpointed(blocks, saved.recompute(keep)), x)
    assert_equal(found, expected)
    assert report.moved_bytes >= 2 * 9 * x.nbytes  # qkv, out, up and down of both blocks
    assert policy.offloader.store.pool.taken_bytes == 0


def test_a_selective_checkpoint_goes_through_one_backward() -> None:
    blocks, x = gpt(16, 1), torch.randn(2, 5, 16, requires_grad=True)
    loss = Checkpointed(blocks, saved.recompute(OPS))(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(SavedError, match="one backward"):
        loss.backward()
    with pytest.raises(SavedError, match="operators with their overload"):
        saved.recompute(keep=["addmm"])


@pytest.mark.parametrize("moves", [False, True], ids=["kept", "moved"])
@pytest.mark.parametrize("bias", [True, False], ids=["addmm", "mm"])
@pytest.mark.parametrize("way", ["result", "rows", "parts", "data"])
def test_a_kept_result_that_is_changed_in_place_is_computed_again(way: str, bias: bool, moves: bool) -> None:
    """It was taken as it was after the change, and changed once more: gradients were wrong.

    Of rows, a linear layer returns the product's memory as a tensor that counts its changes apart; so do other calls.
    """
    layer, keep = nn.Linear(4, 4, bias=bias), [torch.ops.aten.mm.default, *OPS]
    x = torch.randn((2, 3, 4) if way == "rows" else (2, 4))

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if way == "parts":
                torch.unsafe_split(y.detach(), 1)[0].mul_(2)
            else:
                (y.data if way == "data" else y).mul_(2)
            return y.sin()

    blocks = nn.Sequential(Doubled(), Doubled())
    expected = grads_of(blocks, x)
    with moving() if moves else nullcontext():
        found = grads_of(Checkpointed(blocks, saved.recompute(keep)), x)
    assert_equal(found, expected)


def test_a_weight_that_autocast_has_cast_before() -> None:
    """The second run casts it, which the first did not; torch's own contexts fail then."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def grads(**options: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            region = layer if not options else partial(checkpoint, layer, use_reentrant=False, **options)
            losses = [region(x).tanh().sum() for _ in range(2)]
        return list(torch.autograd.grad(losses[0] + losses[1], [x, *layer.parameters()]))

    assert_equal(grads(context_fn=saved.recompute(OPS)), grads())


# Compiled modules


def test_a_compiled_module_inside() -> None:
    model, x = gpt(16, 1), torch.randn(2, 5, 16)
    expected = grads_of(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(grads_of(compiled, x), expected)
    policy = moving()
    for _ in range(2):
        with policy as report:
            assert_equal(grads_of(compiled, x), expected)
    assert report.moved_bytes > 0


def test_a_compiled_module_under_mutable_is_refused_or_right() -> None:
    """torch 2.11 runs it in eager code; torch 2.13 refuses it."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled, outcome = torch.compile(layer, backend="aot_eager", fullgraph=True), ""
    try:
        with saved.mutable():
            outcome = "right" if torch.equal(compiled(x), layer(x)) else "wrong"
    except RuntimeError as error:
        outcome = str(error)
    assert outcome == "right" or "dispatch mode" in outcome


def test_dropout_is_the_same() -> None:
    def loss(*policies: AbstractContextManager[Any]) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        if policies:
            with policies[0]:
                y = F.dropout(x.sin(), 0.3).sum()
        else:
            y = F.dropout(x.sin(), 0.3).sum()
        y.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(loss(moving()), loss())
