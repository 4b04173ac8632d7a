"""Parameters that are DTensors: the split equals a plain backward, defers, and reduces in the right half."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from compare import names
from gloo import on_ranks
from parallel_models import (
    DIM,
    LENGTH,
    VOCABULARY,
    CollectiveCounter,
    ShardedBlock,
    assert_same_layout,
    language_model,
    put_on,
    token_loss,
    whole,
)
from sternway import saved, split
from sternway.errors import SplitError

NORMS = {"before", "between", "norm"}


def _mesh(ranks: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Every gradient equals the other's, in value, type and placements."""
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        grad, wanted = parameter.grad, expected[name].grad
        assert grad is not None, name
        assert wanted is not None, name
        assert_same_layout(grad, wanted, name)
        torch.testing.assert_close(whole(grad), whole(wanted), msg=lambda text, name=name: f"{name}: {text}")


def _compare(
    make: Callable[[], nn.Module],
    call: Callable[[nn.Module, Any], Tensor],
    inputs: list[Any],
    exact: bool = False,
) -> tuple[nn.Module, split.Pending]:
    """Split twice, beside plain backwards; the model, and the last ``Pending``, already run."""
    ours, theirs = make(), make()
    for given in inputs:
        wants = isinstance(given, Tensor) and given.is_floating_point()
        x, y = ((given.detach().clone().requires_grad_() if wants else given) for _ in range(2))
        with CollectiveCounter() as fused:
            call(theirs, y).backward()
        with CollectiveCounter() as in_f:
            loss = call(ours, x)
        with CollectiveCounter() as in_i:
            grad, pending = split.backward_input(loss, None, x if wants else (), exact=exact)
        with CollectiveCounter() as in_w:
            pending.run()
        if wants:
            assert_same_layout(grad, y.grad)
            torch.testing.assert_close(whole(grad), whole(y.grad))
        counts = [mode.count for mode in (in_f, in_i, in_w, fused)]
        assert counts[3] > 0
        assert sum(counts[:3]) == counts[3], counts
        assert counts[2] == 0, counts  # the products of W need no other rank
        _assert_same(ours, theirs)
    return ours, pending


def _rows(rank: int, sequence: bool) -> None:
    torch.manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (2, LENGTH)) for _ in range(2)]
    for exact in (False, True):
        ours, pending = _compare(
            lambda: put_on(language_model(), _mesh(), sequence),
            lambda model, tokens: token_loss(model(tokens), tokens),
            batches,
            exact,
        )
        waits = {name for name, _ in ours.named_parameters() if name.split(".")[-2] not in NORMS}
        assert names(ours, pending.deferred) == waits
    reference = language_model()
    for tokens in batches:
        token_loss(reference(tokens), tokens).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("sequence", [False, True], ids=["whole activations", "sequence parallel"])
def test_a_language_model_equals_backward_and_one_process(sequence: bool) -> None:
    on_ranks(2, _rows, sequence)


def _loss_parallel(rank: int) -> None:
    torch.manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (2, LENGTH)) for _ in range(2)]
    with loss_parallel():
        ours, _ = _compare(
            lambda: put_on(language_model(), _mesh(), sequence=True, whole_logits=False),
            lambda model, tokens: token_loss(model(tokens), tokens),
            batches,
        )
    reference = language_model()
    for tokens in batches:
        token_loss(reference(tokens), tokens).backward()
    torch.testing.assert_close(whole(ours.head.weight.grad), reference.head.weight.grad)


def test_loss_parallel() -> None:
    on_ranks(2, _loss_parallel)


def _inputs(rank: int) -> None:
    """An input that is a DTensor, an output that is one, and what lies between under a checkpoint or a policy."""
    mesh = _mesh()

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        plan = {
            "0": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(input_layouts=Shard(-1), use_local_output=False),
        }
        return parallelize_module(model, mesh, plan)

    for placements in ([Replicate()], [Shard(0)]):
        torch.manual_seed(2)
        x = distribute_tensor(torch.randn(4, DIM), mesh, placements)
        ways: list[Callable[[nn.Module, Any], Any]] = [
            lambda model, x: model(x),
            lambda model, x: checkpoint(model, x, use_reentrant=False),
        ]
        for way in ways:
            _compare(make, lambda model, x, way=way: way(model, x).full_tensor().square().sum(), [x, x])
    for policy in (saved.offload(budget="1KiB"), saved.compress("bf16"), nullcontext()):
        ours, theirs = make(), make()
        y = torch.randn(4, DIM)
        theirs(y).full_tensor().square().sum().backward()
        with policy:
            loss = ours(y).full_tensor().square().sum()
        split.backward_input(loss)[1].run()
        for name, parameter in theirs.named_parameters():
            grad = dict(ours.named_parameters())[name].grad
            torch.testing.assert_close(whole(grad), whole(parameter.grad), rtol=0.05, atol=0.05)


def test_inputs_and_outputs_that_are_dtensors() -> None:
    on_ranks(2, _inputs)


def _hooks(rank: int) -> None:
    mesh = _mesh()
    seen: dict[str, list[Any]] = {"ours": [], "theirs": []}

    def make(who: str) -> nn.Module:
        torch.manual_seed(0)
        block = put_on(ShardedBlock(), mesh, sequence=False)
        for name in ("up.weight", "down.bias", "attention.query.weight"):
            parameter = block.get_parameter(name)
            parameter.register_hook(lambda grad, name=name: seen[who].append((name, grad.placements, grad.clone())))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen[who].append((name, "after")))
        return block

    ours, theirs = make("ours"), make("theirs")
    x = torch.randn(2, LENGTH, DIM)
    theirs(x).square().sum().backward()
    pending = split.backward_input(ours(x).square().sum())[1]
    assert seen["ours"] == [], "hooks of deferred parameters run in W"
    pending.run()
    by_name = [sorted((each[0], len(each)) for each in seen[who]) for who in seen]
    assert by_name[0] == by_name[1]
    found, expected = ({each[0]: each for each in seen[who] if len(each) == 3} for who in ("ours", "theirs"))
    for name, (_, placements, grad) in expected.items():
        assert found[name][1] == placements
        torch.testing.assert_close(whole(found[name][2]), whole(grad))
    _assert_same(ours, theirs)


def test_hooks_of_dtensor_parameters_run_once_and_in_w() -> None:
    on_ranks(2, _hooks)


def _resharded(rank: int) -> None:
    """FSDP frees what it gathered at the end of I; of parameters on a tensor-parallel mesh, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for needs_grad in (True, False):
        block = put_on(ShardedBlock(), mesh["tp"], sequence=False)
        fully_shard(block, mesh=mesh["dp"])
        y = block(torch.randn(2, LENGTH, DIM, requires_grad=needs_grad))
        with pytest.raises(SplitError, match="FSDP must not reduce or reshard at the end of I"):
            split.backward_input(y.square().sum())


def test_fsdp2_on_a_tensor_parallel_module_is_refused_where_it_would_lose_gradients() -> None:
    on_ranks(4, _resharded)


def _unsynced(rank: int) -> None:
    """FSDP2 set to keep gradients unsharded: the split adds to what a last plain backward reduces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make() -> Any:
        torch.manual_seed(0)
        block = put_on(ShardedBlock(), mesh["tp"], sequence=False)
        fully_shard(block.attention, mesh=mesh["dp"])
        return fully_shard(block, mesh=mesh["dp"])

    torch.manual_seed(mesh.get_local_rank("dp"))
    ours, theirs = make(), make()
    batches = [torch.randn(2, LENGTH, DIM) for _ in range(3)]
    for number, x in enumerate(batches):
        last = number == len(batches) - 1
        for model in (ours, theirs):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
        theirs(x).square().sum().backward()
        if last:
            ours(x).square().sum().backward()
        else:
            pending = split.backward_input(ours(x).square().sum())[1]
            assert (len(pending.deferred), len(pending.ready)) == (9, 4), "only norms do not wait"
            pending.run()
    _assert_same(ours, theirs)
    assert all(isinstance(parameter, DTensor) for parameter in ours.parameters())


def test_fsdp2_that_keeps_gradients_unsharded() -> None:
    on_ranks(4, _unsynced)
