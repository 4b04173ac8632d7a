"""No copy for a hook that looks; nothing kept when a graph is gone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from sternway.state import BackwardState
from ways import EVERY, WAYS, run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own


class Big:
    """Something whose end can be seen."""


def address(tensor: Tensor) -> int:
    """Where the numbers are; unlike ``data_ptr()``, asking does not end a lazy copy."""
    return torch._C._data_address(tensor)


@pytest.mark.parametrize("way", EVERY)
def test_an_observing_hook_adds_no_copy(way: str) -> None:
    """What three hooks at two places see is the very memory that becomes the leaf's gradient."""
    state, seen = BackwardState(), []
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def look(grad: Tensor) -> None:
        seen.append((address(grad), grad.norm().item()))

    def forward(x: Tensor) -> Tensor:
        y = state.on_grad(x, look)
        z = state.on_grad(y.view(64, 8, 8), look, look)
        return (z.view(64, 64) * weight).sum()

    run(forward, way)(x).backward()
    torch.testing.assert_close(x.grad, weight)
    assert x.grad is not None
    assert [where for where, _ in seen] == [address(x.grad)] * 3


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_dropped_takes_its_hooks_and_values_with_it(way: str) -> None:
    state, x = BackwardState(), torch.randn(4, requires_grad=True)

    def forward(x: Tensor, state: BackwardState, fn: object) -> Tensor:
        return state.on_grad(x.sin(), fn).sum()  # type: ignore[arg-type]

    compiled = run(forward, way)

    def call(state: BackwardState) -> tuple[Tensor, list[weakref.ref[Big]]]:
        held, value = Big(), Big()
        loss = compiled(x, state, lambda grad, held=held: None)
        state.value = value
        return loss, [weakref.ref(held), weakref.ref(value)]

    loss, watched = call(state)
    later, _ = call(state)  # the state goes on to the next call
    gc.collect()
    assert all(each() is not None for each in watched), "the graph keeps them"
    del loss
    gc.collect()
    assert [each() for each in watched] == [None, None]

    loss, watched = call(BackwardState())
    gc.collect()
    assert all(each() is not None for each in watched), "the graph keeps them, without the state"
    del loss
    gc.collect()
    assert [each() for each in watched] == [None, None], "neither state nor graph is left"
    later.backward()


@pytest.mark.parametrize("way", WAYS)
def test_forwards_without_a_backward_do_not_pile_up(way: str) -> None:
    state, x = BackwardState(), torch.randn(4, requires_grad=True)
    compiled = run(lambda x: state.on_grad(x.sin(), lambda grad: None).sum(), way)
    for _ in range(20):
        compiled(x)
    gc.collect()
    assert len(state._wire.marks) == 0
    compiled(x).backward()
    assert len(state._wire.added) == 0
    assert "0 places" in repr(state)


def test_no_cuda_graph_is_made_of_a_graph_with_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be replayed without them, from memory that they must not keep; a GPU test runs it so."""
    from torch._inductor.output_code import CompiledFxGraph

    reasons: list[str | None] = []
    make = CompiledFxGraph.__init__

    def made(self: CompiledFxGraph, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)
        reasons.append(self.disabled_cudagraphs_reason)

    monkeypatch.setattr(CompiledFxGraph, "__init__", made)
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    state, seen = BackwardState(), []
    compiled = torch.compile(lambda x: state.on_grad(x * 2, seen.append).sum(), fullgraph=True, mode="reduce-overhead")
    compiled(torch.ones(3, requires_grad=True)).backward()
    assert len(seen) == 1
    assert len(reasons) == 2
    assert all("BackwardState" in str(reason) for reason in reasons)
