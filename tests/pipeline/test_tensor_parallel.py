"""Tensor parallelism inside the stages: gradients and training steps equal one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from gloo import on_ranks
from parallel_models import (
    DIM,
    LENGTH,
    VOCABULARY,
    ShardedBlock,
    assert_same_layout,
    language_model,
    put_on,
    token_loss,
    whole,
)
from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline import Pipeline
from sternway.split import Pending
from sternway.split.compiled._backend import sternway

LAYERS, STEPS, MICROBATCHES = 4, 3, 4


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def _batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _assert_steps_equal(pipe: Pipeline, reference: nn.Module) -> None:
    """Three steps of both, with the gradients and then the parameters compared."""
    optimizer, theirs = _sgd(pipe), _sgd(reference)
    named = list(pipe.named_parameters())
    expected = dict(reference.named_parameters())
    for step in range(STEPS):
        tokens = _batch(step)
        loss = token_loss(reference(tokens), tokens)
        loss.backward()
        result = pipe.step(tokens, target=tokens, loss_everywhere=True)
        torch.testing.assert_close(result.loss, loss.detach())
        for name, parameter in named:
            grad = whole(parameter.grad)
            torch.testing.assert_close(
                grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    for name, parameter in named:
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach(), rtol=1e-4, atol=1e-6)


def _train(rank: int) -> None:
    mesh = _mesh()
    model = put_on(language_model(LAYERS), mesh["tp"], sequence=False)
    pipe = Pipeline(model, mesh=mesh, schedule="zb-v", n_microbatches=MICROBATCHES, loss_fn=token_loss)
    assert any(isinstance(parameter, DTensor) for parameter in pipe.parameters())
    _assert_steps_equal(pipe, language_model(LAYERS))
    pipe.close()


def test_whole_activations_between_blocks() -> None:
    on_ranks(4, _train)


def _compiled(rank: int) -> None:
    mesh = _mesh()
    model = put_on(language_model(LAYERS), mesh["tp"], sequence=False)
    for block in model.blocks:
        block.compile(backend=sternway, options={"inner": "eager"})
    pipe = Pipeline(model, mesh=mesh, schedule="zb-h1", n_microbatches=MICROBATCHES, loss_fn=token_loss)
    sharded = {id(p) for name, p in pipe.named_parameters() if "blocks" in name and isinstance(p, DTensor)}
    waiting: list[set[int]] = []
    run = Pending.run

    def seen(pending: Pending) -> None:
        waiting.append({id(parameter) for parameter in pending.deferred})
        run(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "run", seen)
        _assert_steps_equal(pipe, language_model(LAYERS))
    assert sharded
    assert len(waiting) == STEPS * MICROBATCHES
    assert all(sharded <= each for each in waiting)
    pipe.close()


def test_weights_of_compiled_blocks_wait() -> None:
    on_ranks(4, _compiled)


def _loss_parallel(rank: int) -> None:
    mesh = _mesh()
    model = put_on(language_model(2), mesh["tp"], sequence=True, whole_logits=False)
    pipe = Pipeline(model, mesh=mesh, schedule="zb-h1", n_microbatches=MICROBATCHES, loss_fn=token_loss)
    with loss_parallel():
        _assert_steps_equal(pipe, language_model(2))
    pipe.close()


def test_loss_parallel() -> None:
    on_ranks(4, _loss_parallel)


class _Stage(nn.Module):
    """Two layers; what it returns is a DTensor, sharded as ``style`` leaves it."""

    def __init__(self, mesh: DeviceMesh | None, seed: int, layout: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        if mesh is not None:
            plan = {
                "up": ColwiseParallel(input_layouts=layout),
                "down": RowwiseParallel(output_layouts=layout, use_local_output=False),
            }
            parallelize_module(self, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(whole(output), target)


def _norms(rank: int) -> None:
    """Sequence parallelism leaves a term of a norm's gradient on each rank; norms, clips and ties need the sum."""
    mesh = _mesh()
    model = put_on(language_model(LAYERS), mesh["tp"], sequence=True)
    model.head.weight = model.tokens.weight
    reference = language_model(LAYERS)
    reference.head.weight = reference.tokens.weight
    pipe = Pipeline(model, mesh=mesh, schedule="zb-h1", n_microbatches=MICROBATCHES, loss_fn=token_loss)
    expected = dict(reference.named_parameters())
    optimizer, theirs = _sgd(pipe), _sgd(reference)
    for step in range(STEPS):
        tokens = _batch(step)
        token_loss(reference(tokens), tokens).backward()
        pipe.step(tokens, target=tokens)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert norm > 0.5
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norm, rtol=1e-4, atol=1e-6)
        for name, parameter in pipe.named_parameters():
            wanted = expected[name if name in expected else "tokens.weight"].grad
            assert_same_layout(parameter.grad, parameter.detach(), name)
            torch.testing.assert_close(whole(parameter.grad), wanted, rtol=1e-4, atol=1e-6)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    pipe.close()


def test_norms_clips_and_ties() -> None:
    on_ranks(4, _norms)


def _with_fsdp(rank: int) -> None:
    """Tensor parallelism inside of FSDP2 inside of a pipeline."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    place = mesh.get_local_rank("dp_shard")
    model, reference = put_on(language_model(LAYERS), mesh["tp"], sequence=True), language_model(LAYERS)

    def shard(stage: nn.Module) -> None:
        for each in stage.modules():
            if isinstance(each, ShardedBlock):
                fully_shard(each, mesh=mesh["dp_shard"])

    pipe = Pipeline(
        model,
        mesh=mesh,
        shard=shard,
        schedule="zb-h1",
        n_microbatches=MICROBATCHES,
        loss_fn=token_loss,
        sample=_batch(0)[:2],
    )
    expected = dict(reference.named_parameters())
    optimizer, theirs = _sgd(pipe), _sgd(reference)
    for step in range(STEPS):
        tokens = torch.cat([_batch(2 * step), _batch(2 * step + 1)])
        token_loss(reference(tokens), tokens).backward()
        mine = tokens.chunk(2)[place]
        pipe.step(mine, target=mine)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norm, rtol=1e-4, atol=1e-6)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad),
                expected[name].grad,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    pipe.close()


def test_inside_of_fsdp2() -> None:
    on_ranks(8, _with_fsdp)


def _boundaries(rank: int, layouts: list[Any]) -> None:
    mesh = _mesh()
    plan = schedules.make("zb-v", ranks=2, microbatches=4)
    for layout in layouts:
        mine = plan.placement[mesh.get_local_rank("pp")]
        stages = {index: _Stage(mesh["tp"], index, layout) for index in mine}
        reference = nn.Sequential(*(_Stage(None, index, None) for index in range(plan.num_stages)))
        pipe = Pipeline(stages, mesh=mesh, schedule=plan, loss_fn=_mean_square)
        x, target = torch.randn(8, 2, DIM), torch.randn(8, 2, DIM)
        F.mse_loss(reference(x), target).backward()
        given = x if not isinstance(layout, Shard) else x.chunk(2, layout.dim)[mesh.get_local_rank("tp")]
        result = pipe.step(given, target=target, loss_everywhere=True)
        torch.testing.assert_close(result.loss, F.mse_loss(reference(x), target).detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), dict(reference.named_parameters())[name].grad)
        evaluated = pipe.evaluate(given, target=target)
        torch.testing.assert_close(evaluated.loss, result.loss)
        pipe.close()


def test_dtensors_cross_stage_boundaries() -> None:
    on_ranks(4, _boundaries, [Replicate(), Shard(1)])


def _refused(rank: int) -> None:
    mesh = _mesh()
    index = mesh.get_local_rank("pp")
    stages = {index: _Stage(mesh["tp"], index, Partial() if index == 0 else Replicate())}
    pipe = Pipeline(stages, mesh=mesh, schedule="1f1b", n_microbatches=2, loss_fn=_mean_square)
    with pytest.raises(PipelineError, match=r"a stage cannot send this DTensor.*Partial.*use_local_output=True"):
        pipe.step(torch.ones(4, DIM), target=torch.ones(4, DIM))


def test_terms_of_a_sum_do_not_cross() -> None:
    on_ranks(4, _refused)


def _meshes(rank: int) -> None:
    mesh = _mesh()
    stage = {mesh.get_local_rank("pp"): _Stage(mesh["pp"], 0, Replicate())}
    options: Any = {"schedule": "1f1b", "n_microbatches": 2, "loss_fn": _mean_square}
    with pytest.raises(PipelineError, match=r"must be sharded over ranks that hold the same stage; got up\.weight"):
        Pipeline(stage, mesh=mesh, **options)
    with pytest.raises(PipelineError, match="needs the mesh of all their ranks"):
        Pipeline(stage, **options)
    model = put_on(language_model(), mesh["tp"], sequence=False)
    with pytest.raises(PipelineError, match="what a sharded model takes is not counted; got tokens"):
        Pipeline(model, mesh=mesh, memory="1GB", sample=_batch(0)[:2], **(options | {"loss_fn": token_loss}))


def test_parameters_on_other_meshes_are_refused() -> None:
    on_ranks(4, _meshes)
