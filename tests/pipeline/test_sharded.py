"""Stages that ``fully_shard`` has sharded: gradients equal one process's, gathered no more often than planned."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gloo import on_ranks
from searches import searches_at_once
from sharded_cases import (
    DIM,
    MICROBATCHES,
    assert_same,
    batch,
    build,
    counting,
    every_block,
    every_schedule,
    loss_fn,
    make_mesh,
    optimizers,
    policies,
    stages,
    step,
    whole,
)
from sternway import pipeline, schedule
from sternway.demo import GPT
from sternway.errors import NonfiniteError
from sternway.pipeline import Pipeline
from sternway.split.compiled._backend import sternway


def test_every_schedule_has_the_gradients_of_one_process() -> None:
    on_ranks(4, every_schedule, "cpu")


def _few_gathered(rank: int) -> None:
    """With room for one of two stages, a stage is gathered whenever its turn comes, and W after I still has it."""
    mesh = make_mesh()
    for name in ("zb-v", "dualpipe-v"):
        plan = schedule.make(name, ranks=2, microbatches=MICROBATCHES)
        pipe, reference = build(mesh, plan, every_block, gathered=1)
        place = mesh.get_local_rank("pp")
        planned = sum(str(each).endswith("UNSHARD") for each in pipe.schedule.actions[place])
        assert planned > 2
        torch.manual_seed(1)
        for _ in range(2):
            counts = step(pipe, reference, mesh.get_local_rank("dp_shard"), name)
            assert tuple(counts.values()) == (2 * planned, 4)
        pipe.close()


def test_fewer_gathered_stages_than_a_rank_has() -> None:
    on_ranks(4, _few_gathered)


def _compiled(rank: int) -> None:
    mesh = make_mesh()

    def shard(stage: nn.Module, over: DeviceMesh) -> None:
        for block in stage:
            block.compile(backend=sternway, options={"inner": "eager"})
        every_block(stage, over)

    pipe, reference = build(mesh, schedule.make("zb-v", ranks=2, microbatches=MICROBATCHES), shard)
    torch.manual_seed(1)
    for _ in range(2):
        step(pipe, reference, mesh.get_local_rank("dp_shard"), "zb-v, compiled")
    pipe.close()


def test_compiled_blocks() -> None:
    on_ranks(4, _compiled)  # test_matrix.py has checkpointed ones


def test_three_optimizer_steps_and_norms_over_every_dimension() -> None:
    on_ranks(4, optimizers, "cpu")


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
    mesh = make_mesh()
    place, copy = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    stage = Poison() if place else nn.Linear(DIM, DIM)
    fully_shard(stage, mesh=mesh["dp_shard"])
    scaler = pipeline.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    pipe = Pipeline({place: stage}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    torch.manual_seed(copy)
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    before = {name: whole(p).clone() for name, p in pipe.named_parameters()}
    for bad in (True, False):
        if isinstance(stage, Poison):
            stage.bad = bad and copy == 1  # on one process of four
        pipe.step(x, target=target)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        same = [torch.equal(whole(p), before[name]) for name, p in pipe.named_parameters()]
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


def test_mixed_precision_and_offload_policies_are_fsdps() -> None:
    on_ranks(4, policies, "cpu")


def _hybrid(rank: int) -> None:
    """Replicas of shards, averaged by FSDP, or by the pipeline along the dimension that FSDP does not have."""
    names = ("pp", "dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    plan = schedule.make("zb-h1", ranks=1, microbatches=2)
    for dims in (("dp_replicate", "dp_shard"), ("dp_shard",)):
        made, reference = stages(1), nn.Sequential(*stages(1))
        every_block(made[0], mesh[dims])
        pipe = Pipeline(dict(enumerate(made)), schedule=plan, loss_fn=F.mse_loss, mesh=mesh)
        torch.manual_seed(1)
        x, target = batch(16)
        pipe.step(x.chunk(4)[rank], target=target.chunk(4)[rank])
        F.mse_loss(reference(x), target).backward()
        assert_same(made[0], reference[0], str(dims))
        torch.testing.assert_close(pipe.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        pipe.close()


def test_replicas_of_shards() -> None:
    on_ranks(4, _hybrid)


def _whole_model(rank: int, plan: str) -> None:
    """Cut, sharded by a function, and with the head tied to the embedding: in one rank's stages, or in two ranks'."""
    mesh = make_mesh()
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
        model, schedule=plan, n_microbatches=4, loss_fn=loss, sample=mine[:2], sample_target=mine[:2], mesh=mesh,
        shard=shard,
    )  # fmt: skip
    assert all(isinstance(p, DTensor) for p in pipe.parameters())
    both = [torch.optim.SGD(each.parameters(), 0.1, foreach=False) for each in (pipe, reference)]
    for _ in range(3):
        result = pipe.step(mine, target=mine, loss_everywhere=True)
        assert result.loss is not None
        norm = pipe.clip_grad_norm_(0.5)
        loss(reference(tokens), tokens).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), rtol=1e-4, atol=1e-5)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter), wanted[name], rtol=1e-3, atol=1e-5)
    pipe.close()


@pytest.mark.parametrize("plan", ["auto", "zb-h1", "zb-v"])
def test_a_whole_model_is_cut_and_then_sharded(plan: str) -> None:
    on_ranks(4, _whole_model, plan)


def _whole_model_mixed(rank: int) -> None:
    """A cut model with casts by FSDP's policies, beside FSDP2 alone: also what goes on as float32 from a block."""
    mesh = make_mesh()
    copy = mesh.get_local_rank("dp_shard")
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def blocks() -> nn.Sequential:
        return nn.Sequential(*stages(2), nn.Linear(DIM, DIM))

    def shard(model: nn.Module) -> None:
        for part in model.children():
            fully_shard(part, mesh=mesh["dp_shard"], mp_policy=policy)

    alone = blocks()
    shard(alone)
    torch.manual_seed(1)
    x, target = (each.chunk(2)[copy] for each in batch(16))
    pipe = Pipeline(
        blocks(), schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, sample=x[:2], shard=shard
    )
    for _ in range(2):
        pipe.step(x, target=target)
        for number, (piece, goal) in enumerate(zip(x.chunk(2), target.chunk(2), strict=True)):
            for part in alone:
                part.set_requires_gradient_sync(number == 1)
            (F.mse_loss(alone(piece), goal) / 2).backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter.grad), whole(wanted[name].grad), rtol=1e-4, atol=1e-6)
    pipe.close()


def test_a_whole_model_in_mixed_precision() -> None:
    on_ranks(4, _whole_model_mixed)


def _tries_plans(rank: int) -> None:
    """Copies that share shards try the same plans in the same steps, and the gradients are right in every one."""
    mesh = make_mesh()
    copy = mesh.get_local_rank("dp_shard")
    model, reference = (nn.Sequential(*(block for stage in stages(2) for block in stage)) for _ in range(2))

    def shard(stage: nn.Module) -> None:
        for block in stage.children():
            fully_shard(block, mesh=mesh["dp_shard"])

    torch.manual_seed(1)
    x, target = batch(4 * MICROBATCHES)
    F.mse_loss(reference(x), target).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    x, target = (each.chunk(2)[copy] for each in (x, target))
    with searches_at_once():
        pipe = Pipeline(
            model, schedule="auto", n_microbatches=MICROBATCHES, loss_fn=F.mse_loss, sample=x[:2],
            sample_target=target[:2], mesh=mesh, shard=shard,
        )  # fmt: skip
    ran: list[schedule.Schedule] = []
    while not pipe.plans and (number := len(ran)) < 160:  # plans that are close are compared for longer
        ran.append(pipe.schedule)
        pipe.step(x, target=target, record=False)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), expected[name], rtol=1e-4, atol=1e-6,
                msg=lambda text, name=name, number=number: f"step {number}, {ran[-1].name}, {name}: {text}",
            )  # fmt: skip
            parameter.grad = None
    pipe.stop_tuning()
    assert len(pipe.plans) > 1
    assert all(schedule.sharded(plan) == plan for plan in ran), "every plan gathers and reduces"
    everyone = pipe.transport.crew_apart(range(4)).share([plan.actions for plan in [*ran, pipe.schedule]])
    assert all(each == everyone[0] for each in everyone)
    pipe.close()


def test_copies_try_the_same_plans() -> None:
    on_ranks(4, _tries_plans)


class _Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


class _Calls(nn.Module):
    """Calls another method of its child than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.encoder.encode(x)


def _methods(rank: int) -> None:
    """Methods that are registered as forwards are commanded, too: FSDP's nodes would reduce at the end of I."""
    mesh = make_mesh()
    copy = mesh.get_local_rank("dp_shard")

    def shard(stage: nn.Module) -> None:
        for module in stage.modules():
            if isinstance(module, _Encoder):
                fully_shard(module, mesh=mesh["dp_shard"])
                register_fsdp_forward_method(module, "encode")

    for plan in ("zb-h1", "1f1b"):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Calls() for _ in range(2)))
        reference = deepcopy(model)
        x, target = batch(4 * MICROBATCHES)
        mine = [each.chunk(2)[copy] for each in (x, target)]
        pipe = Pipeline(
            model, schedule=plan, n_microbatches=MICROBATCHES, loss_fn=loss_fn, mesh=mesh, sample=mine[0][:2],
            shard=shard,
        )  # fmt: skip
        wanted = dict(reference.named_parameters())
        for _ in range(2):
            with counting() as counts:
                pipe.step(mine[0], target=mine[1])
            assert tuple(counts.values()) == (1, 1)
            F.mse_loss(reference(x), target).backward()
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(whole(parameter.grad), wanted[name].grad, rtol=1e-4, atol=1e-6)
        pipe.close()


def test_methods_that_are_registered_as_forwards() -> None:
    on_ranks(4, _methods)
