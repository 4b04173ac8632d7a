"""What tests of sharded stages share: pipelines of stages that ``fully_shard`` has sharded, on CPUs or small GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from sternway import schedule
from sternway.pipeline import Pipeline

DIM, MICROBATCHES = 8, 4
# What FSDP calls in newer torch, and in older.
GATHER_REDUCE = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

Shard = Callable[[nn.Module, DeviceMesh], None]


def stages(count: int, device: str = "cpu") -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(DIM, 2, heads=2).to(device) for _ in range(count)]


def batch(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, DIM).to(device), torch.randn(rows, 4, DIM).to(device)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(ours: nn.Module, theirs: nn.Module, what: str, **close: float) -> None:
    """Gradients and values, whole, of two modules."""
    close = close or CLOSE
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
        say = functools.partial("{}: {}: {}".format, what, name)
        torch.testing.assert_close(whole(p), whole(q), **close, msg=say)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(whole(p.grad), whole(q.grad), **close, msg=say)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.to(target.dtype), target)


def every_block(stage: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for block in stage:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(stage, mesh=mesh, **options)


def blocks_alone(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The second block stays plain: its gradients are averaged by the pipeline."""
    fully_shard(stage[0], mesh=mesh)


def one_unit(stage: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(stage, mesh=mesh)


def as_a_group(stage: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard([stage[0], stage[1]], mesh=mesh)
    fully_shard(stage, mesh=mesh)


@contextmanager
def counting(amount: Callable[[list[Tensor]], int] = lambda tensors: 1) -> Iterator[dict[str, int]]:
    """Counts the collectives of FSDP, each as ``amount`` of its tensors."""
    counts = dict.fromkeys(GATHER_REDUCE, 0)
    before = {name: getattr(dist, name) for name in counts}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += amount([each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)])
            return before[name](*args, **kwargs)

        return call

    for name in counts:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def make_mesh(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp_shard"))


def build(mesh: DeviceMesh, plan: schedule.Schedule, shard: Shard, **options: Any) -> tuple[Pipeline, nn.Sequential]:
    """A pipeline of sharded stages, and the whole model in one process."""
    device = mesh.device_type
    made, reference = stages(plan.num_stages, device), nn.Sequential(*stages(plan.num_stages, device))
    held = {index: made[index] for index in plan.placement[mesh.get_local_rank("pp")]}
    for stage in held.values():
        shard(stage, mesh["dp_shard"])
    return Pipeline(held, schedule=plan, loss_fn=loss_fn, mesh=mesh, **options), reference


def step(pipe: Pipeline, reference: nn.Module, copy: int, what: str, **close: float) -> dict[str, int]:
    """A step of both, compared; returns how many collectives FSDP made."""
    x, target = batch(4 * MICROBATCHES, pipe.transport.device.type)
    with counting() as counts:
        result = pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
    F.mse_loss(reference(x), target).backward()
    for index, stage in pipe.stages.items():
        assert_same(stage.module, reference[index], what, **close)
    timeline = result.timeline
    assert timeline is not None
    assert [[event.action for event in row] for row in timeline.events] == [list(row) for row in pipe.schedule.actions]
    return counts


def every_schedule(rank: int, device: str) -> None:
    """Gradients equal one process's; each unit is gathered once in a step, and reduced once."""
    mesh = make_mesh(device)
    copy = mesh.get_local_rank("dp_shard")
    for name, shard, units in [
        ("1f1b", every_block, 2),
        ("zb-h1", every_block, 2),
        ("zb-h1", blocks_alone, 1),
        ("zb-h1", one_unit, 1),
        ("zb-h1", as_a_group, 1),
        ("zb-v", every_block, 2),
        ("dualpipe-v", every_block, 2),
    ]:
        plan = schedule.make(name, ranks=2, microbatches=MICROBATCHES)
        pipe, reference = build(mesh, plan, shard)
        assert pipe.schedule == schedule.sharded(plan)
        torch.manual_seed(1)
        for number in range(2):  # gradients add up over steps, too
            counts = step(pipe, reference, copy, f"{name}, {shard.__name__}, step {number}")
            wanted = units * len(pipe.stages)  # each unit of each stage once, whatever the microbatches
            assert tuple(counts.values()) == (wanted, wanted), f"{counts}, {name}"
        with torch.no_grad():
            x, target = batch(4 * MICROBATCHES, device)
            theirs = F.mse_loss(reference(x.chunk(2)[copy]), target.chunk(2)[copy])
        with counting() as counts:
            ours = pipe.evaluate(x.chunk(2)[copy], target=target.chunk(2)[copy]).loss
        torch.testing.assert_close(ours, theirs)
        assert tuple(counts.values()) == (wanted, 0)
        pipe.close()


def optimizers(rank: int, device: str) -> None:
    """Three optimizer steps with clipped gradients, taken at once or on trial."""
    mesh = make_mesh(device)
    copy = mesh.get_local_rank("dp_shard")
    plan = schedule.make("zb-h1", ranks=2, microbatches=MICROBATCHES)
    for trial in (False, True):
        pipe, reference = build(mesh, plan, blocks_alone if trial else every_block)
        mine = torch.optim.SGD(
            pipe.parameters(), 0.1, momentum=0.9, foreach=False
        )  # plain and sharded parameters together
        theirs = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(1)
        for max_norm in (1e-2, 1e3, 1e-2):
            x, target = batch(4 * MICROBATCHES, device)
            pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
            F.mse_loss(reference(x), target).backward()
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            if trial:
                pipe.optimizer_step(mine, max_norm=max_norm)
            else:
                torch.testing.assert_close(pipe.clip_grad_norm_(max_norm), wanted)
                mine.step()
                mine.zero_grad()
            theirs.step()
            theirs.zero_grad()
        pipe.settle()
        for index, stage in pipe.stages.items():
            assert_same(stage.module, reference[index], f"trial {trial}", rtol=1e-4, atol=1e-5)
        pipe.close()


def policies(rank: int, device: str) -> None:
    """Beside FSDP2 alone, which gets the same microbatches of all stages one after the other."""
    mesh = make_mesh(device)
    copy = mesh.get_local_rank("dp_shard")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for name, options in [
        ("zb-h1", {"mp_policy": mixed}),
        ("1f1b", {"mp_policy": mixed}),
        ("1f1b", {"mp_policy": low}),
        ("zb-h1", {"offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda")}),
    ]:
        plan = schedule.make(name, ranks=2, microbatches=MICROBATCHES)
        shard = functools.partial(every_block, **options)
        pipe, _ = build(mesh, plan, shard)
        alone = stages(plan.num_stages, device)
        for stage in alone:
            shard(stage, mesh["dp_shard"])
        torch.manual_seed(1)
        x, target = (each.chunk(2)[copy] for each in batch(4 * MICROBATCHES, device))
        pipe.step(x, target=target)
        pieces = list(zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True))
        for number, (piece, goal) in enumerate(pieces):
            for stage in alone:
                assert isinstance(stage, FSDPModule)
                stage.set_requires_gradient_sync(number + 1 == MICROBATCHES)
            y = piece
            for stage in alone:
                y = stage(y)
            (loss_fn(y, goal) / MICROBATCHES).backward()
        for index, stage in pipe.stages.items():
            assert_same(stage.module, alone[index], f"{name}, {options}", rtol=1e-4, atol=1e-6)
            assert all(p.grad.dtype == torch.float32 for p in stage.module.parameters() if p.grad is not None)
        pipe.close()
