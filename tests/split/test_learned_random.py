"""Random Functions, honest and not: whatever they do, the split leaves what a plain backward leaves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import learning  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads
from sternway import saved, split

HABITS = (
    "ignores inputs",
    "ignores weights",
    "other weights alone",
    "other inputs alone",
    "counts",
    "adds to a tensor",
    "adds unseen",
    "empties a list",
    "draws",
    "changes its gradient",
    "raises alone",
    "leaves out a weight",
    "returns its gradient",
    "returns one tensor twice",
)


@dataclass
class Shared:
    """What backwards of one model may change."""

    count: int = 0
    items: list[int] = field(default_factory=lambda: list(range(100)))
    total: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass(frozen=True)
class Spec:
    """One Function: how many activations and weights it takes, in which order, and what it does in which mode."""

    order: tuple[str, ...]  # "x" an activation, "w" a weight, "b" a bias, "n" a number
    outputs: int
    materialize: bool
    habits: tuple[str, ...]
    modes: frozenset[int]  # in which it has these habits


def make(spec: Spec) -> type[Function]:
    places = {kind: [place for place, each in enumerate(spec.order) if each == kind] for kind in "xwbn"}

    class Random(Function):
        @staticmethod
        def forward(ctx: Any, shared: Shared, mode: int, *args: Any) -> Any:
            ctx.set_materialize_grads(spec.materialize)
            tensors = [each for each in args if isinstance(each, Tensor)]
            ctx.save_for_backward(*tensors)
            ctx.shared, ctx.mode, ctx.whole = shared, mode, ctx.needs_input_grad
            first = sum(args[x] for x in places["x"])
            y = sum((first @ args[w] for w in places["w"]), start=torch.zeros(()))
            for b in places["b"]:
                y = y + args[b]
            return y if spec.outputs == 1 else (y, first.sum(0))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            habits = spec.habits if ctx.mode in spec.modes else ()
            shared, needs, saved = ctx.shared, ctx.needs_input_grad[2:], iter(ctx.saved_tensors)
            args = [None if kind == "n" else next(saved) for kind in spec.order]
            of_y, of_sum = grads[0], grads[1] if spec.outputs == 2 else None
            wants_x = any(needs[x] for x in places["x"])
            wants_w = any(needs[w] for w in places["w"])
            alone = ctx.needs_input_grad != ctx.whole
            if "raises alone" in habits and alone:
                raise RuntimeError("called alone")
            if "counts" in habits:
                shared.count += 1
            if "adds to a tensor" in habits:
                shared.total += 1
            if "adds unseen" in habits:
                shared.total.numpy()[...] += 1
            if "empties a list" in habits:
                shared.items.pop()
            if "draws" in habits and of_y is not None:
                of_y = of_y * torch.rand(())
            if "changes its gradient" in habits and of_y is not None:
                of_y.mul_(2)
            first = sum(args[x] for x in places["x"])
            of_args: list[Tensor | None] = [None] * len(args)
            of_first = torch.zeros_like(first)
            if of_y is not None:
                for w in places["w"]:
                    of_first = of_first + of_y @ args[w].t()
            if of_sum is not None:
                of_first = of_first + of_sum
            if "other inputs alone" in habits and alone and not wants_w:
                of_first = of_first * 1.5
            for x in places["x"]:
                if needs[x] or "ignores inputs" in habits:
                    of_args[x] = of_first.clone() if "returns one tensor twice" not in habits else of_first
            for w in places["w"]:
                if (needs[w] or "ignores weights" in habits) and of_y is not None:
                    of_args[w] = (
                        first.t() @ of_y * (1.5 if "other weights alone" in habits and alone and not wants_x else 1)
                    )
            for b in places["b"]:
                if needs[b] and of_y is not None:
                    of_args[b] = of_y.sum(0)
            if "leaves out a weight" in habits:
                of_args[places["w"][-1]] = None
            if "returns its gradient" in habits and of_y is not None and of_y.shape == first.shape and wants_x:
                of_args[places["x"][0]] = of_y
            return (None, None, *of_args)

    return Random


class Net(nn.Module):
    """A few calls of one Function in a row, some with weights in common."""

    def __init__(self, spec: Spec, function: type[Function], calls: int, tied: bool, around: str) -> None:
        super().__init__()
        self.around = around
        self.spec, self.function, self.calls, self.shared = spec, function, calls, Shared()
        count = 1 if tied else calls
        self.weights = nn.ParameterList(torch.randn(4, 4) / 2 for kind in spec.order * count if kind == "w")
        self.biases = nn.ParameterList(torch.randn(4) for kind in spec.order * count if kind == "b")
        self.seen: list[Tensor] = []
        if around == "hook":
            self.weights[0].register_hook(self.seen.append)

    def forward(self, x: Tensor, mode: int) -> Tensor:
        if self.around == "checkpoint":
            return checkpoint(self.calls_in_a_row, x, mode, use_reentrant=False)
        with saved.compress("bf16", min_bytes=0) if self.around == "policy" else nullcontext():
            return self.calls_in_a_row(x, mode)

    def calls_in_a_row(self, x: Tensor, mode: int) -> Tensor:
        weights, biases = list(self.weights) * self.calls, list(self.biases) * self.calls
        for _ in range(self.calls):
            args = []
            for number, kind in enumerate(self.spec.order):
                args.append({"x": x, "n": number}[kind] if kind in "xn" else {"w": weights, "b": biases}[kind].pop(0))
            y = self.function.apply(self.shared, mode, *args)
            x = (y if isinstance(y, Tensor) else y[0] + y[1]).sin()
        return x


SPECS = st.builds(
    Spec,
    st.lists(st.sampled_from("xwbn"), min_size=2, max_size=5)
    .filter(lambda order: "x" in order and "w" in order)
    .map(tuple),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.lists(st.sampled_from(HABITS), max_size=2, unique=True).map(tuple),
    st.frozensets(st.integers(0, 2), min_size=1),
)


@settings(max_examples=40, deadline=None)
@given(
    SPECS,
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["nothing", "checkpoint", "hook", "policy"]),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([3, 4])), min_size=3, max_size=5),
)
def test_random_functions(
    spec: Spec, calls: int, tied: bool, first_stage: bool, exact: bool, around: str, rounds: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    function = make(spec)
    split.learn(function)
    model, reference = (Net(spec, function, calls, tied, around) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    for seed, (mode, rows) in enumerate(rounds):
        x = torch.randn(rows, 4, requires_grad=not first_stage)
        torch.manual_seed(seed)
        reference(x, mode).square().sum().backward()
        theirs, x.grad, state = x.grad, None, torch.get_rng_state()
        torch.manual_seed(seed)
        grad, pending = split.backward_input(model(x, mode).square().sum(), None, [x], exact=exact)
        pending.run()
        assert torch.equal(torch.get_rng_state(), state)
        if theirs is not None:
            torch.testing.assert_close(grad[0], theirs, rtol=0, atol=0)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-4}
        assert_same_grads(model, reference, **tolerance)
        for ours, other in zip(model.seen, reference.seen, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-4)
        assert model.shared.count == reference.shared.count
        assert model.shared.items == reference.shared.items
        assert model.shared.total.equal(reference.shared.total)
    if not spec.habits:
        name = f"{function.__module__}.{function.__qualname__}"
        assert {row.verdict for row in split.kinds() if row.name == name} <= {"split"}
    split.unlearn(function)
