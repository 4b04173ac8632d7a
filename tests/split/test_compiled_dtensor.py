"""Compiled regions with parameters that are DTensors: they wait for W as others do, and all collectives are in I."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from compare import names
from compiled import compiled
from gloo import on_ranks
from parallel_models import DIM, LENGTH, ShardedBlock, assert_same_layout, put_on, whole
from sternway import split
from sternway.errors import SplitError
from sternway.split.compiled._offer import Offer
from sternway.split.compiled._work import CompiledWork


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def _sharded(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(_layers(), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


def _assert_same(ours: nn.Module, theirs: nn.Module, reference: nn.Module | None = None) -> None:
    """Every gradient is that of a plain backward, in value and layout, and that of one process."""
    expected = dict(theirs.named_parameters())
    one = dict((reference or theirs).named_parameters())
    for name, parameter in ours.named_parameters():
        grad, wanted = parameter.grad, expected[name].grad
        assert grad is not None, name
        assert wanted is not None, name
        assert_same_layout(grad, wanted, name)
        if isinstance(grad, DTensor):
            assert grad.stride() == wanted.stride(), name
            assert grad.to_local().stride() == wanted.to_local().stride(), name
        for each in (wanted, one[name].grad):
            torch.testing.assert_close(whole(grad), whole(each), msg=lambda text, name=name: f"{name}: {text}")


def _collectives(graph: Any) -> list[str]:
    return [node.name for node in graph.nodes if "c10d" in node.op]


def _assert_collectives_in_i(model: nn.Module) -> None:
    for graphs in split.inspect(model):
        assert _collectives(graphs.I)
        assert not _collectives(graphs.W)


def _in_flight(rank: int, inner: str, order: tuple[int, ...], needs_input_grad: bool) -> None:
    """Three microbatches between I and W at once, beside plain backwards and beside one process."""
    ours, theirs, reference = _sharded(_mesh()), _sharded(_mesh()), _layers()
    fast = compiled(ours, inner)
    calls: Counter[tuple[str, str]] = Counter()
    for name, parameter in ours.named_parameters():
        parameter.register_hook(lambda grad, name=name: calls.update([("tensor", name)]))
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: calls.update([("accumulated", name)]))
    torch.manual_seed(3)
    pendings = []
    for _ in range(3):
        x = torch.randn(4, DIM, requires_grad=needs_input_grad)
        y = x.detach().clone().requires_grad_(needs_input_grad)
        theirs(y).square().sum().backward()
        reference(x.detach()).square().sum().backward()
        grad, pending = split.backward_input(fast(x).square().sum(), None, [x])
        torch.testing.assert_close(grad[0], y.grad)
        assert names(ours, pending.deferred) == {name for name, _ in ours.named_parameters()}
        pendings.append(pending)
    assert not calls
    assert all(parameter.grad is None for parameter in ours.parameters())
    for done, number in enumerate(order):
        pendings[number].run()
        assert set(calls.values()) == {done + 1}
        assert len(calls) == 12  # two kinds of hooks on six parameters
    _assert_same(ours, theirs, reference)
    _assert_collectives_in_i(ours)


@pytest.mark.parametrize("needs_input_grad", [True, False], ids=["inputs", "first stage"])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_columns_and_rows(inner: str, needs_input_grad: bool) -> None:
    on_ranks(2, _in_flight, inner, (1, 2, 0), needs_input_grad)


def _by_sequence(rank: int, inner: str) -> None:
    """Norms have a term of their gradient on each rank, and are computed in I, as in eager code."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return put_on(ShardedBlock(), _mesh(), sequence=True)

    ours, theirs = make(), make()
    fast = compiled(ours, inner)
    torch.manual_seed(3 + rank)  # each rank has its own part of the sequence
    for length in (LENGTH // 2, LENGTH):  # the second time, Dynamo takes the length for a symbol
        x = torch.randn(2, length, DIM, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        theirs(y).square().sum().backward()
        grad, pending = split.backward_input(fast(x).square().sum(), None, x)
        waits = names(ours, pending.deferred)
        pending.run()
        torch.testing.assert_close(grad, y.grad)
        _assert_same(ours, theirs)
    linear = {name for name, _ in ours.named_parameters() if name.split(".")[-2] not in ("before", "between")}
    assert linear <= waits, linear - waits
    assert any(isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),) for p in theirs.parameters())
    _assert_collectives_in_i(ours)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_sequence_parallel_blocks(inner: str) -> None:
    on_ranks(2, _by_sequence, inner)


class _Gathered(nn.Module):
    """Gathers its weight in the forward, so that the backward reduces and scatters the gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(DIM, DIM), mesh, [Shard(0)]))
        self.other = nn.Parameter(distribute_tensor(torch.randn(DIM, DIM), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.linear(F.linear(x, weight), self.other.to_local())


def _reduced(rank: int, inner: str) -> None:
    ours, theirs = _Gathered(_mesh()), _Gathered(_mesh())
    fast = compiled(ours, inner)
    torch.manual_seed(3 + rank)
    for _ in range(2):
        x = torch.randn(4, DIM, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        theirs(y).square().sum().backward()
        grad, pending = split.backward_input(fast(x).square().sum(), None, x)
        waits, ready = names(ours, pending.deferred), names(ours, pending.ready)
        pending.run()
        torch.testing.assert_close(grad, y.grad)
        _assert_same(ours, theirs)
    assert (waits, ready) == ({"other"}, {"weight"})
    _assert_collectives_in_i(ours)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_gradient_that_ranks_reduce_is_computed_in_i(inner: str) -> None:
    on_ranks(2, _reduced, inner)


def _asked_for(rank: int) -> None:
    """A parameter among the inputs: its gradient is returned, and not accumulated."""
    ours, theirs = _sharded(_mesh()), _sharded(_mesh())
    x = torch.ones(4, DIM, requires_grad=True)
    theirs(x).square().sum().backward()
    loss = compiled(ours)(x).square().sum()
    (_, found), pending = split.backward_input(loss, None, [x, ours[1].weight])
    assert "1.weight" not in names(ours, pending.deferred)
    pending.run()
    assert ours[1].weight.grad is None
    assert_same_layout(found, theirs[1].weight.grad)
    torch.testing.assert_close(whole(found), whole(theirs[1].weight.grad))
    ours[1].weight.grad = theirs[1].weight.grad  # compared above
    _assert_same(ours, theirs)


def test_a_gradient_that_is_asked_for() -> None:
    on_ranks(2, _asked_for)


class _Halves(Tensor):
    """A tensor made of two, the first of which has the name that a DTensor's part has."""

    _local_tensor: Tensor
    other: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, other: Tensor) -> _Halves:
        made: _Halves = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        made._local_tensor, made.other = first, other
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "_Halves()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_local_tensor", "other"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], layout: None, size: Any, stride: Any) -> _Halves:
        return _Halves(parts["_local_tensor"], parts["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch declares it as a static method
        def half(name: str) -> Any:
            given = torch.utils._pytree.tree_map_only(_Halves, lambda each: getattr(each, name), (args, kwargs or {}))
            return func(*given[0], **given[1])

        first, other = half("_local_tensor"), half("other")
        return _Halves(first, other) if isinstance(first, Tensor) else first


def test_of_other_subclasses_nothing_waits() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(DIM, DIM, bias=False)
        layer.weight = nn.Parameter(_Halves(torch.randn(DIM, DIM), torch.randn(DIM, DIM)))
        return layer

    def call(layer: Callable[[Tensor], Any]) -> Any:
        return layer(torch.arange(2.0 * DIM).view(2, DIM)).square().sum()

    ours, theirs = make(), make()
    call(theirs).backward()
    _, pending = split.backward_input(call(compiled(ours)))
    assert not pending.deferred
    pending.run()
    grad, wanted = ours.weight.grad, theirs.weight.grad
    torch.testing.assert_close(grad._local_tensor, wanted._local_tensor)
    torch.testing.assert_close(grad.other, wanted.other)


def test_a_mark_that_does_not_arrive_is_an_error() -> None:
    """A gradient that is neither a mark nor has one inside would be taken for computed."""
    weight = torch.ones(2, requires_grad=True)
    node = weight.exp().grad_fn
    mark = torch.empty(()).expand(2)
    offer = Offer(node, [0])
    offer.accept(CompiledWork(None, [], [torch.ones(2)], (), (True,)), {id(mark): 0})
    with pytest.raises(SplitError, match=r"must arrive at its node as it is.* got 0 of 1 marks"):
        offer.after((mark.clone(),), ())
    assert offer.after((mark,), ()) == (None,)
    assert not offer.ready
