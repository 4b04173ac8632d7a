"""Bugs that were found, each with its story. Most came from a hunt for graphs on which the split is not a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compare import assert_same_grads, assert_split_equals_backward, names
from sternway import split
from sternway.errors import PendingError, SplitError
from sternway.split import _behind, _planner


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_equal_on(call: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
    """Two rounds, exact and not; the first leaf is the input, the others get ``.grad``."""
    for exact in (False, True):
        ours, theirs = _leaves(*shapes, dtype=dtype), _leaves(*shapes, dtype=dtype)
        for _ in range(2):
            call(*theirs).backward()
            _, pending = split.backward_input(call(*ours), None, ours[0], exact=exact)
            pending.run()
            for mine, other in zip(ours[1:], theirs[1:], strict=True):
                torch.testing.assert_close(mine.grad, other.grad)


def test_a_gradient_that_is_summed_more_than_once() -> None:
    """Sums are done in one call for all parameters; on a GPU, two of them into one place raced."""
    layer = nn.Linear(4, 4)
    pending = assert_split_equals_backward(layer, torch.randn(3, 4), call=lambda m, x: m(m(m(x))), rounds=3)
    assert names(layer, pending.deferred) == {"weight", "bias"}


def test_a_derived_weight_under_a_checkpoint_is_not_recomputed_in_w() -> None:
    """W is a backward of its own, in which the region would run once more: a changed buffer, or an error."""
    runs = 0

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = (nn.Parameter(torch.randn(s)) for s in ((4, 4), (4, 2), (2, 4)))

        def forward(self, x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return x @ (self.w + self.a @ self.b)

    def policy(*_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    for options in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, policy)}):
        runs = 0
        x = torch.randn(5, 4, requires_grad=True)
        assert_split_equals_backward(
            LowRank(), x, call=lambda m, x, o=options: checkpoint(m, x, use_reentrant=False, **o), rounds=1
        )
        assert runs == 4  # forward and recomputation, for us and for the reference
    for _ in range(10):
        normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        x = torch.randn(5, 4, requires_grad=True)
        assert_split_equals_backward(normed, x, call=lambda m, x: checkpoint(m, x, use_reentrant=False), rounds=1)


def test_gradient_stops_at_an_input_inside_the_graph_even_if_something_below_needs_it() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    h = x * 2
    (for_h, for_x), _ = split.backward_input((h * 3 + x).sum(), None, (h, x))
    torch.testing.assert_close(for_h, torch.full((3, 4), 3.0))
    torch.testing.assert_close(for_x, torch.ones(3, 4))
    norm = torch.randn(4, requires_grad=True)
    h = x * norm
    split.backward_input((h * norm).sum(), None, h)[1].run()
    torch.testing.assert_close(norm.grad, h.detach().sum(0))


def test_what_waits_must_not_change() -> None:
    """Autograd refuses a saved tensor that was changed in place; so does W. It was used silently."""
    for change in ("input", "gradient", "returned gradient"):
        x, z, w = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
        g = torch.ones(4, 4)
        if change == "returned gradient":
            (gx, _), pending = split.backward_input(((x + z @ w) * 2).sum(), None, (x, z))
            gx.mul_(10)
        else:
            _, pending = split.backward_input(x @ w, g, x)
            with torch.no_grad():
                (x if change == "input" else g).zero_()
        with pytest.raises(
            PendingError, match=r"must not be changed in place.* got a changed gradient of shape \(4, 4\)"
        ):
            pending.run()


class _InPlace(torch.autograd.Function):
    """Its backward changes the gradient that it gets, which is not only its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].mul_(2)


@pytest.mark.parametrize("by", ["hook", "node hook", "function"])
def test_a_gradient_that_is_changed_in_place_while_i_runs(by: str) -> None:
    """A plain backward has used it by then for the weight. W read it as it was afterwards, without notice."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for _ in range(2):
        above = _InPlace.apply(x.sin()) if by == "function" else x.sin()  # type: ignore[no-untyped-call]
        if by == "hook":
            above.register_hook(lambda grad: grad.mul_(2))
        elif by == "node hook":
            above.grad_fn.register_prehook(lambda grads: (grads[0].mul_(2),))
        with pytest.raises(SplitError, match=r"changed in place while I runs.* gradient of shape \(4, 4\)"):
            split.backward_input(above + x @ w, torch.ones(4, 4), x, own_thread=True)


def test_a_gradient_that_is_changed_in_place_before_it_arrives() -> None:
    """Nobody else has it by then."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    _, pending = split.backward_input(_InPlace.apply(x @ w).sin(), torch.ones(4, 4), x)  # type: ignore[no-untyped-call]
    pending.run()
    grad = w.grad
    w.grad = None
    _InPlace.apply(x @ w).sin().backward(torch.ones(4, 4))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(grad, w.grad)


def test_an_optimizer_in_the_backward_and_a_parameter_as_the_other_factor() -> None:
    """The hook of one parameter changed it before W read it as a factor of another's gradient."""
    results = []
    for way in ("plain", "split"):
        torch.manual_seed(0)
        latents, layer, x = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

        def step(p: nn.Parameter) -> None:
            with torch.no_grad():
                p -= p.grad
            p.grad = None

        for parameter in (latents, *layer.parameters()):
            parameter.register_post_accumulate_grad_hook(step)
        loss = (x + layer(latents)).tanh().sum()
        loss.backward() if way == "plain" else split.backward_input(loss, None, x)[1].run()
        results.append((latents, layer.weight, layer.bias))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_hook_over_several_parameters() -> None:
    """torch's multi-grad hooks count within one backward, so hooked parameters must share one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    seen: list[list[bool]] = []
    parameters = list(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(parameters, lambda gs: seen.append([g is not None for g in gs]))
    first: list[Tensor] = []
    torch.autograd.graph.register_multi_grad_hook(parameters, first.append, mode="any")
    split.backward_input(model(torch.randn(2, 3)).sum())[1].run()
    assert seen == [[True] * 4]
    assert len(first) == 1


def test_a_hook_removed_during_i_stays_removed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    seen: list[Tensor] = []
    handle = model[1].weight.register_hook(seen.append)
    y = model(torch.randn(2, 3))
    y.register_hook(lambda grad: handle.remove())
    split.backward_input(y.sum())[1].run()
    assert not seen


def test_a_vector_reached_through_t() -> None:
    assert_equal_on(lambda x, w, b: torch.addmm(b.t(), x, w).square().sum(), (4, 4), (4, 4), (4,))
    assert_equal_on(lambda x, w, b: F.conv1d(x, w, b.t()).square().sum(), (2, 3, 7), (4, 3, 3), (4,))

    def hooked(x: Tensor, v: Tensor) -> Tensor:  # W goes through the engine, from the node of t() on
        transposed = v.t()
        transposed.register_hook(lambda grad: 2 * grad)
        return torch.mv(x, transposed).square().sum()

    assert_equal_on(hooked, (3, 4), (4,))


def test_complex_factors() -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w, alpha=2j, beta=3j).abs().sum()

    assert_equal_on(call, (4, 4), (4, 4), (4,), dtype=torch.complex128)


def test_a_parameter_frozen_between_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    y = model(torch.randn(2, 3)).sum()
    model.requires_grad_(False)
    split.backward_input(y)[1].run()
    assert all(p.grad is None for p in model.parameters())


def test_sparse_and_dense_gradients_of_one_parameter() -> None:
    ids = torch.tensor([[0, 1, 2]])
    assert_equal_on(lambda x, w: F.linear(F.embedding(ids, w, sparse=True).tanh(), w).sum() + x.sum(), (1,), (6, 4))
    assert_equal_on(lambda x, w: (F.embedding(ids, w, sparse=True) * F.embedding(ids, w)).sum() + x.sum(), (1,), (6, 4))
    assert_equal_on(lambda x, w: (x @ w).sum() + F.embedding(ids, w, sparse=True).sum(), (2, 6), (6, 4))


def test_sparse_operands() -> None:
    sparse = torch.eye(4, dtype=torch.float64).to_sparse()
    assert_equal_on(lambda x, w: torch.mm(sparse, w).sum() + x.sum(), (1,), (4, 3))


def test_casts_that_change_more_than_precision() -> None:
    assert_equal_on(lambda x, w: (x.to(torch.complex128) @ w.to(torch.complex128)).abs().sum(), (3, 4), (4, 5))
    assert_equal_on(lambda x, w: (x.float() @ w.bfloat16().float()).sum(), (3, 4), (4, 5))


def test_a_gradient_of_another_type_than_its_parameter() -> None:
    weight = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch has no Tensor.grad_dtype")
    weight.grad_dtype = torch.float32
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    split.backward_input((x @ weight).sum(), None, x)[1].run()
    assert weight.grad.dtype == torch.float32


def test_a_parameter_that_is_not_dense() -> None:
    weight = torch.randn(8, 8)[::2, ::2].t().requires_grad_()
    other = weight.detach().clone(memory_format=torch.preserve_format).as_strided((4, 4), (1, 4)).requires_grad_()
    for leaf in (weight, other):
        expected = torch.autograd.grad((torch.ones(3, 4) @ leaf).sum(), leaf)[0]
        split.backward_input((torch.ones(3, 4) @ leaf).sum())[1].run()
        torch.testing.assert_close(leaf.grad, expected)
    assert weight.grad.is_contiguous()


def test_two_rules_on_one_node_under_a_checkpoint() -> None:
    """Each rule reads the node's saved tensors, and the node does; a checkpoint allows one read."""
    from sternway.split._rules import RULES

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(x, a, b)
            return x * a + b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, a, _ = ctx.saved_tensors
            return grad * a, grad * x, grad

    split.rule("BothBackward", 1)(lambda n: split.Later(lambda grad, x: grad * x, n.saved_tensors[0]))
    split.rule("BothBackward", 2)(lambda n: split.Later(lambda grad, x: grad.clone(), n.saved_tensors[0]))
    try:
        assert_equal_on(
            lambda x, a, b: checkpoint(Both.apply, x.sin(), a, b, use_reentrant=False).square().sum(), *[(4, 4)] * 3
        )
    finally:
        del RULES["BothBackward"]


def test_long_chains_of_derived_weights_take_no_square_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan looked at the whole chain again for each product; 2,000 of them took eight seconds."""
    weight = torch.randn(2, 2, requires_grad=True)
    x = h = torch.randn(1, 2, requires_grad=True)
    w = weight
    for _ in range(300):
        w = w * 0.99
        h = (h @ w).tanh()
    looked: list[str] = []
    real = _behind.packing
    for module in (_behind, _planner):
        monkeypatch.setattr(module, "packing", lambda node: looked.append(type(node).__name__) or real(node))
    split.backward_input(h.sum(), None, x)[1].run()
    assert looked
    assert len(looked) < 5 * 300


class Odd(NamedTuple):
    a: Any
    b: Any


class Stranger(Odd):
    def __new__(cls) -> Stranger:
        return super().__new__(cls, torch.ones(2, requires_grad=True), 3)


@dataclass
class Partly:
    x: Any
    later: Any = field(init=False)


def test_odd_containers() -> None:
    stranger, partly = Stranger(), Partly(torch.ones(2, requires_grad=True))
    grads, _ = split.backward_input((stranger.a * partly.x).sum(), None, [stranger, partly])
    torch.testing.assert_close(grads[0].a, torch.ones(2))
    torch.testing.assert_close(grads[1].x, torch.ones(2))
    assert not hasattr(grads[1], "later")


def test_containers_that_would_be_taken_for_leaves() -> None:
    x = torch.ones(2, requires_grad=True)
    for inputs in ((t for t in [x]), {x}, {"a": x}.values()):
        with pytest.raises(SplitError, match="must be nested in tuples, lists, dicts and dataclasses; got a "):
            split.backward_input(x.sum(), None, inputs)
    y = x * 2
    with pytest.raises(SplitError, match=r"got a dict of 2 with \['b', 'c'\] for outputs"):
        split.backward_input({"a": y, "b": y}, {"b": torch.ones(2), "c": torch.ones(2)}, x)


def test_a_rule_that_fails_leaves_no_hooks_behind() -> None:
    from sternway.split._rules import RULES

    class Odd1(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
            return x * a

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad

    split.rule("Odd1Backward", 1)(lambda node: 1 / 0)
    layer, a = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    reference = copy.deepcopy(layer)
    x = torch.randn(3, 4, requires_grad=True)
    y = layer(Odd1.apply(x, a)).sum()
    try:
        with pytest.raises(ZeroDivisionError):
            split.backward_input(y, None, x)
    finally:
        del RULES["Odd1Backward"]
    y.backward()
    reference(x * a).sum().backward()
    assert_same_grads(layer, reference)
