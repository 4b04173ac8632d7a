"""``exact=True``: what W adds to ``.grad`` equals autograd's in every bit, over several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sternway import saved, split


class Shared(nn.Module):
    """Weights that are used once, several times, in sums, transposed, and as a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.convolution = nn.Conv1d(3, 3, 3, padding=1, bias=False)
        self.table, self.norm = nn.Embedding(10, 16), nn.LayerNorm(16)
        self.low, self.high = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.randn(2, 16))
        self.columns = nn.Parameter(torch.randn(16, 16).t())

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        hidden = self.first(self.table(rows) + x).relu()
        hidden = self.first(self.second(hidden)).tanh()
        hidden = self.first(self.norm(self.convolution(hidden))) + self.second(hidden)
        hidden = F.linear(hidden, self.second.weight + self.low @ self.high).sigmoid() @ self.columns
        return (hidden @ self.table.weight.t()) @ self.table.weight


@pytest.fixture(autouse=True)
def _hooks_of_other_tests_are_known() -> None:
    """A split after hooks were registered anywhere goes through the engine once, as with hooks on the parameters."""
    split.backward_input(torch.ones(2, requires_grad=True).sum())[1].run()


def _differing(exact: bool, dtype: torch.dtype, *, autocast: bool = False, hooked: bool = False) -> list[str]:
    """The parameters whose gradients, accumulated over four steps, do not equal autograd's in every bit."""
    split.backward_input(nn.Linear(1, 1)(torch.ones(1)).sum())[1].run()  # hooks of other tests are behind us
    model = Shared().to(dtype)
    reference = copy.deepcopy(model)
    if hooked:
        for module in (model, reference):
            for parameter in module.parameters():
                parameter.register_hook(lambda grad: grad * 3)
    for _ in range(4):
        x, rows = torch.randn(5, 3, 16, dtype=dtype, requires_grad=True), torch.randint(0, 10, (5, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            ours, theirs = model(x, rows), reference(x, rows)
        grad = torch.randn_like(theirs)
        theirs.backward(grad)
        expected, x.grad = x.grad, None
        found, pending = split.backward_input(ours, grad, x, exact=exact)
        assert torch.equal(found, expected)  # type: ignore[arg-type]
        pending.run()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [name for (name, mine), theirs in pairs if not torch.equal(mine.grad, theirs.grad)]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_bit(dtype: torch.dtype) -> None:
    assert _differing(True, dtype) == []


PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "as it is": ((33, 17), (7, 33), lambda x, w: x @ w),
    "turned twice": ((33, 17), (7, 33), lambda x, w: x @ w.t().t()),
    "permuted": ((17, 33), (7, 33), lambda x, w: x @ w.T),
    "a part of what is turned": ((34, 33), (7, 33), lambda x, w: x @ w.t().chunk(2, 1)[0]),
    "on the left": ((17, 33), (7, 33), lambda x, w: w.t().t() @ x.t()),
    "with a factor": ((33, 17), (7, 33), lambda x, w: torch.addmm(w[0], x, w.t().t(), alpha=0.7)),
    "stacks": ((3, 17, 33), (3, 7, 33), lambda x, w: torch.bmm(x, w.mT)),
    "stacks on the left": ((3, 33, 17), (3, 33, 7), lambda x, w: torch.bmm(w.mT, x)),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_computed_as_autograd_does(name: str, by_columns: bool, hooked: bool) -> None:
    """Which goes by how the operand lies in memory, by columns or by rows: the transpose differs in the last bit."""
    shape, of_x, call = PRODUCTS[name]
    made = torch.randn(shape, dtype=torch.float64)
    made = made.mT.contiguous().mT if by_columns else made
    ours, theirs = made.clone().requires_grad_(), made.clone().requires_grad_()
    for weight in (ours, theirs) if hooked else ():
        weight.register_hook(lambda grad: 3 * grad)
    for _ in range(2):
        x = torch.randn(of_x, dtype=torch.float64, requires_grad=True)
        output = call(x, theirs)
        grad = torch.randn_like(output)
        output.backward(grad)
        split.backward_input(call(x, ours), grad, x, exact=True)[1].run()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_under_autocast() -> None:
    assert _differing(True, torch.float32, autocast=True) == []


def test_with_hooks_on_parameters() -> None:
    """The table is used three times, once as it is: the engine adds that part first."""
    assert set(_differing(True, torch.float32, hooked=True)) <= {"table.weight"}


def test_it_is_not_so_without() -> None:
    """Otherwise this file would show nothing."""
    assert _differing(False, torch.float32) != []


def test_a_packed_pending() -> None:
    model = Shared()
    reference = copy.deepcopy(model)
    for _ in range(2):
        x, rows = torch.randn(5, 3, 16), torch.randint(0, 10, (5, 3))
        reference(x, rows).sum().backward()
        _, pending = split.backward_input(model(x, rows).sum(), exact=True)
        pending.pack(saved.mutable())
        pending.run()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
