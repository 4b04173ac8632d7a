"""Stages that ``fully_shard`` has sharded: gradients equal one process's, gathered no more often than planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gloo import on_ranks
from sternway import pipeline, schedule
from sternway.demo import GPT
from sternway.errors import NonfiniteError, PipelineError
from sternway.pipeline import Pipeline
from sternway.split.compiled._backend import sternway

DIM, MICROBATCHES = 8, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

Shard = Callable[[nn.Module, DeviceMesh], None]


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(DIM, 2, heads=2) for _ in range(count)]


def _batch(rows: int = 2 * MICROBATCHES) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, DIM), torch.randn(rows, 4, DIM)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _assert_same(ours: nn.Module, theirs: nn.Module, what: str, **close: float) -> None:
    """Gradients and values, whole, of two modules."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
        close = close or CLOSE
        say = functools.partial("{}: {}: {}".format, what, name)
        torch.testing.assert_close(_whole(p), _whole(q), **close, msg=say)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(_whole(p.grad), _whole(q.grad), **close, msg=say)


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
def _counting() -> Iterator[dict[str, int]]:
    """Counts the collectives of FSDP, and the bytes that they gather."""
    counts = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 0)
    before = {name: getattr(dist, name) for name in counts}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in counts:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))


def _build(mesh: DeviceMesh, plan: schedule.Schedule, shard: Shard, **options: Any) -> tuple[Pipeline, nn.Sequential]:
    """A pipeline of sharded stages, and the whole model in one process."""
    made, reference = _stages(plan.num_stages), nn.Sequential(*_stages(plan.num_stages))
    held = {index: made[index] for index in plan.placement[mesh.get_local_rank("pp")]}
    for stage in held.values():
        shard(stage, mesh["dp_shard"])
    return Pipeline(held, schedule=plan, loss_fn=F.mse_loss, mesh=mesh, **options), reference


def _step(pipe: Pipeline, reference: nn.Module, copy: int, what: str, **close: float) -> None:
    x, target = _batch(4 * MICROBATCHES)
    result = pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
    F.mse_loss(reference(x), target).backward()
    for index, stage in pipe.stages.items():
        _assert_same(stage.module, reference[index], what, **close)
    timeline = result.timeline
    assert timeline is not None
    assert [[event.action for event in row] for row in timeline.events] == [list(row) for row in pipe.schedule.actions]


def _every_schedule(rank: int) -> None:
    mesh = _mesh()
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
        pipe, reference = _build(mesh, plan, shard)
        assert pipe.schedule == schedule.sharded(plan)
        torch.manual_seed(1)
        for number in range(2):  # gradients add up over steps, too
            with _counting() as counts:
                _step(pipe, reference, copy, f"{name}, {shard.__name__}, step {number}")
            wanted = units * len(pipe.stages)  # each unit of each stage once, whatever the microbatches
            assert counts == {"all_gather_into_tensor": wanted, "reduce_scatter_tensor": wanted}
        with torch.no_grad():
            x, target = _batch(4 * MICROBATCHES)
            theirs = F.mse_loss(reference(x.chunk(2)[copy]), target.chunk(2)[copy])
        with _counting() as counts:
            ours = pipe.evaluate(x.chunk(2)[copy], target=target.chunk(2)[copy]).loss
        torch.testing.assert_close(ours, theirs)
        assert counts == {"all_gather_into_tensor": wanted, "reduce_scatter_tensor": 0}
        pipe.close()


def test_every_schedule_has_the_gradients_of_one_process() -> None:
    on_ranks(4, _every_schedule)


def _few_gathered(rank: int) -> None:
    """With room for one of two stages, a stage is gathered whenever its turn comes, and W after I still has it."""
    mesh = _mesh()
    for name in ("zb-v", "dualpipe-v"):
        plan = schedule.make(name, ranks=2, microbatches=MICROBATCHES)
        pipe, reference = _build(mesh, plan, every_block, gathered=1)
        place = mesh.get_local_rank("pp")
        planned = sum(str(step).endswith("UNSHARD") for step in pipe.schedule.actions[place])
        assert planned > 2
        torch.manual_seed(1)
        for _ in range(2):
            with _counting() as counts:
                _step(pipe, reference, mesh.get_local_rank("dp_shard"), name)
            assert counts == {"all_gather_into_tensor": 2 * planned, "reduce_scatter_tensor": 4}
        pipe.close()


def test_fewer_gathered_stages_than_a_rank_has() -> None:
    on_ranks(4, _few_gathered)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def _variants(rank: int) -> None:
    """Checkpointed and compiled blocks."""
    mesh = _mesh()

    def checkpointed(stage: nn.Module, over: DeviceMesh) -> None:
        for place in range(2):
            stage[place] = Checkpointed(stage[place])
        every_block(stage, over)

    def compiled(stage: nn.Module, over: DeviceMesh) -> None:
        for block in stage:
            block.compile(backend=sternway, options={"inner": "eager"})
        every_block(stage, over)

    for name, shard in [("1f1b", checkpointed), ("zb-v", checkpointed), ("zb-h1", compiled), ("zb-v", compiled)]:
        pipe, reference = _build(mesh, schedule.make(name, ranks=2, microbatches=MICROBATCHES), shard)
        torch.manual_seed(1)
        for _ in range(2):
            _step(pipe, reference, mesh.get_local_rank("dp_shard"), f"{name}, {shard.__name__}")
        if shard is checkpointed:
            calls = [m.calls for stage in pipe.stages.values() for m in stage.module.modules() if hasattr(m, "calls")]
            assert set(calls) == {2 * 2 * MICROBATCHES}  # two steps; F, and once more in the backward
        pipe.close()


def test_checkpointed_and_compiled_blocks() -> None:
    on_ranks(4, _variants)


def _optimizers(rank: int) -> None:
    mesh = _mesh()
    copy = mesh.get_local_rank("dp_shard")
    plan = schedule.make("zb-h1", ranks=2, microbatches=MICROBATCHES)
    for trial in (False, True):
        pipe, reference = _build(mesh, plan, blocks_alone if trial else every_block)
        mine = torch.optim.AdamW(pipe.parameters(), 1e-2, foreach=False)  # plain and sharded parameters together
        theirs = torch.optim.AdamW(reference.parameters(), 1e-2)
        torch.manual_seed(1)
        for max_norm in (1e-2, 1e3, 1e-2):
            x, target = _batch(4 * MICROBATCHES)
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
            _assert_same(stage.module, reference[index], f"trial {trial}", rtol=1e-4, atol=1e-5)
        pipe.close()


def test_three_optimizer_steps_and_norms_over_every_dimension() -> None:
    on_ranks(4, _optimizers)


class Poison(nn.Module):
    """Makes one element of a weight's gradient infinite, which is in the shard of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bad = nn.Linear(DIM, DIM), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.bad:
            y = y + (y[..., :1] * torch.inf).nan_to_num(0.0, 0.0, 0.0) * 0 + _Infinite.apply(y)
        return y


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        bad = torch.zeros_like(grad)
        bad[..., 0] = torch.inf
        return bad


def _nonfinite(rank: int) -> None:
    mesh = _mesh()
    place, copy = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    stage = Poison() if place else nn.Linear(DIM, DIM)
    fully_shard(stage, mesh=mesh["dp_shard"])
    scaler = pipeline.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    pipe = Pipeline({place: stage}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    torch.manual_seed(copy)
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    before = {name: _whole(p).clone() for name, p in pipe.named_parameters()}
    for bad in (True, False):
        if isinstance(stage, Poison):
            stage.bad = bad and copy == 1  # on one process of four
        pipe.step(x, target=target)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        same = [torch.equal(_whole(p), before[name]) for name, p in pipe.named_parameters()]
        assert all(same) if bad else not any(same)
    if isinstance(stage, Poison):
        stage.bad = copy == 1
    assert pipe.step(x, target=target, nonfinite="skip").nonfinite is not None
    assert all(p.grad is None for p in pipe.parameters())
    with pytest.raises(NonfiniteError, match="the gradients of step"):
        pipe.step(x, target=target, nonfinite="raise")
    if isinstance(stage, Poison):
        stage.bad = False
    assert pipe.step(x, target=target, nonfinite="raise").nonfinite is None
    pipe.close()


def test_an_infinity_in_one_shard_is_seen_by_all() -> None:
    on_ranks(4, _nonfinite)


def _policies(rank: int) -> None:
    """Beside FSDP2 alone, which gets the same microbatches of all stages one after the other."""
    mesh = _mesh()
    copy = mesh.get_local_rank("dp_shard")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for name, options in [
        ("zb-h1", {"mp_policy": mixed}),
        ("1f1b", {"mp_policy": mixed}),
        ("zb-v", {"mp_policy": low}),
        ("zb-h1", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ]:
        plan = schedule.make(name, ranks=2, microbatches=MICROBATCHES)
        shard = functools.partial(every_block, **options)
        pipe, _ = _build(mesh, plan, shard)
        alone = _stages(plan.num_stages)
        for stage in alone:
            shard(stage, mesh["dp_shard"])
        torch.manual_seed(1)
        x, target = (each.chunk(2)[copy] for each in _batch(4 * MICROBATCHES))
        pipe.step(x, target=target)
        pieces = list(zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True))
        for number, (piece, goal) in enumerate(pieces):
            for stage in alone:
                assert isinstance(stage, FSDPModule)
                stage.set_requires_gradient_sync(number + 1 == MICROBATCHES)
            y = piece
            for stage in alone:
                y = stage(y)
            (F.mse_loss(y.to(goal.dtype), goal) / MICROBATCHES).backward()
        for index, stage in pipe.stages.items():
            _assert_same(stage.module, alone[index], f"{name}, {options}", rtol=2e-2, atol=1e-4)
            assert all(p.grad.dtype == torch.float32 for p in stage.module.parameters() if p.grad is not None)
        pipe.close()


def test_mixed_precision_and_offload_policies_are_fsdps() -> None:
    on_ranks(4, _policies)


def _hybrid(rank: int) -> None:
    """Replicas of shards, averaged by FSDP, or by the pipeline along the dimension that FSDP does not have."""
    names = ("pp", "dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    plan = schedule.make("zb-h1", ranks=1, microbatches=2)
    for dims in (("dp_replicate", "dp_shard"), ("dp_shard",)):
        made, reference = _stages(1), nn.Sequential(*_stages(1))
        every_block(made[0], mesh[dims])
        pipe = Pipeline(dict(enumerate(made)), schedule=plan, loss_fn=F.mse_loss, mesh=mesh)
        torch.manual_seed(1)
        x, target = _batch(16)
        pipe.step(x.chunk(4)[rank], target=target.chunk(4)[rank])
        F.mse_loss(reference(x), target).backward()
        _assert_same(made[0], reference[0], str(dims))
        torch.testing.assert_close(pipe.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        pipe.close()


def test_replicas_of_shards() -> None:
    on_ranks(4, _hybrid)


def _whole_model(rank: int) -> None:
    """Cut, searched, sharded by a function, and with the head tied to the embedding."""
    mesh = _mesh()
    copy = mesh.get_local_rank("dp_shard")
    torch.manual_seed(0)
    model, reference = (GPT(vocabulary=12, dim=DIM, heads=2, layers=4, length=6) for _ in range(2))
    model.head.weight = model.tokens.weight
    reference.head.weight = reference.tokens.weight
    reference.load_state_dict(model.state_dict())

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def shard(stage: nn.Module) -> None:
        for name, module in stage.named_modules():
            if name and not any(True for _ in module.named_children()) and any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh["dp_shard"])

    tokens = torch.randint(0, 12, (16, 6))
    mine = tokens.chunk(2)[copy]
    pipe = Pipeline(
        model, schedule="auto", n_microbatches=4, loss_fn=loss, sample=mine[:2], sample_target=mine[:2], mesh=mesh,
        shard=shard,
    )  # fmt: skip
    assert all(isinstance(p, DTensor) for name, p in pipe.named_parameters() if "positions" not in name)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, foreach=False) for each in (pipe, reference)]
    for _ in range(3):
        result = pipe.step(mine, target=mine, loss_everywhere=True)
        assert result.loss is not None
        norm = pipe.clip_grad_norm_(0.5)
        loss(reference(tokens), tokens).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(_whole(parameter), whole[name], rtol=1e-3, atol=1e-5)
    pipe.close()


def test_a_whole_model_is_cut_and_then_sharded() -> None:
    on_ranks(4, _whole_model)


def _refusals(rank: int) -> None:
    mesh = _mesh()
    place, over = mesh.get_local_rank("pp"), mesh["dp_shard"]

    def build(stage: nn.Module, **options: Any) -> Pipeline:
        options = {"mesh": mesh, "loss_fn": F.mse_loss, "n_microbatches": 2} | options
        return Pipeline({place: stage}, schedule="1f1b", **options)

    layer = nn.Linear(DIM, DIM)
    parallelize_module(layer, over, ColwiseParallel())
    with pytest.raises(PipelineError, match=r"anything but fully_shard; got weight, sharded by FSDP1 or parallelize"):
        build(layer)
    layer = nn.Linear(DIM, DIM)
    fully_shard(layer, mesh=over)
    with pytest.raises(PipelineError, match=r"must be those of stages on a mesh; got weight, without mesh=. Fix: pass"):
        build(layer, mesh=None, transport=pipeline.LocalTransport(), ranks=2)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    fully_shard(model, mesh=over)
    with pytest.raises(PipelineError, match=r"got 0.weight, of a whole model, before it is cut. Fix: .* shard="):
        Pipeline(model, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh)
    with pytest.raises(PipelineError, match=r'must have a dimension "stages"'):
        build(nn.Linear(DIM, DIM), pp_dim="stages")
    with pytest.raises(PipelineError, match=r"data_dims must be names of dimensions .* got \('pp',\)"):
        build(nn.Linear(DIM, DIM), data_dims=("pp",))
    with pytest.raises(PipelineError, match=r"data or parameters must differ; got \"dp_shard\""):
        build(nn.Linear(DIM, DIM), data_dims=())
    with pytest.raises(PipelineError, match="shard is for a whole model that is cut over a mesh; got stages"):
        build(nn.Linear(DIM, DIM), shard=lambda stage: None)
    outside = GPT(vocabulary=11, dim=DIM, heads=2, layers=2, length=6)
    with pytest.raises(PipelineError, match="shard needs to know what the stages use; got no sample"):
        Pipeline(outside, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, shard=lambda stage: None)


def test_refusals() -> None:
    on_ranks(4, _refusals)


def _any_names(rank: int) -> None:
    """A pipeline dimension of another name, in the middle; one of the others has the same data and plain copies."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("rows", "stages", "cp"))
    place, copy = mesh.get_local_rank("stages"), mesh.get_local_rank("rows")
    mine, reference = _stages(2), nn.Sequential(*_stages(2))
    pipe = Pipeline(
        {place: mine[place]}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, pp_dim="stages",
        data_dims=("rows", "cp"),
    )  # fmt: skip
    torch.manual_seed(1)
    x, target = _batch(8)
    pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
    F.mse_loss(reference(x), target).backward()
    _assert_same(mine[place], reference[place], "any names")
    pipe.close()


def test_a_mesh_of_any_names() -> None:
    on_ranks(4, _any_names)
