"""What composes with what: sharded stages, under each schedule, with blocks that are compiled or computed again.

A row is one kind of stages. Its cells are all pairs of a schedule and a way to run the blocks. In each cell three
optimizer steps are compared with those of one process that has the whole model: losses, gradients, parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import expert_models
from context_models import ContextGPT, context_batch
from expert_models import MixedModel, RoutedExperts
from parallel_models import LENGTH, VOCABULARY, language_model, put_on, token_loss, whole
from sharded_cases import counting
from sternway.pipeline import Pipeline
from sternway.split.compiled._backend import sternway

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "auto")
WAYS = ("eager", "checkpointed", "compiled")
ROWS, STEPS, LAYERS, MICROBATCHES = 8, 3, 4, 4
Batch = tuple[Tensor, Tensor]
Cells = dict[str, tuple[str, ...]]
"""The schedules that are run, by the way to run the blocks."""


@dataclass(frozen=True)
class Kind:
    """One kind of stages.

    Attributes:
        dims: the dimensions of the mesh after "pp", each of two ranks.
        make: the model of a rank, with ``blocks``.
        reference: the same model in one process.
        data: the dimension along which ranks have different rows, or slices of them, if any.
        sharded: whether ``fully_shard`` is called on the blocks.
        experts: whether the ranks of "data" have different experts.
        sliced: whether the ranks of "data" have slices of the same rows.
    """

    dims: tuple[str, ...]
    make: Callable[[DeviceMesh], nn.Module]
    reference: Callable[[], nn.Module]
    data: str | None = None
    sharded: bool = False
    experts: bool = False
    sliced: bool = False

    @property
    def ranks(self) -> int:
        return 2 ** (1 + len(self.dims))

    def batch(self, step: int) -> Batch:
        seeded = torch.Generator().manual_seed(step)
        if self.sliced:
            return context_batch(step, ROWS)
        rows = ROWS if self.data is None else 2 * ROWS
        if self.experts:
            x, target = (torch.randn(rows, 3, expert_models.DIM, generator=seeded) for _ in range(2))
            return x, target
        tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=seeded)
        return tokens, tokens

    @property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        return F.mse_loss if self.experts else token_loss


def _plain(mesh: DeviceMesh) -> nn.Module:
    return language_model(LAYERS).to(mesh.device_type)


def _parallel(mesh: DeviceMesh) -> nn.Module:
    return put_on(_plain(mesh), mesh["tp"], sequence=True)


def _experts(mesh: DeviceMesh) -> nn.Module:
    on_cpu = mesh.device_type == "cpu"  # GPUs have grouped products of bfloat16 alone
    return MixedModel(mesh["ep"], grouped=on_cpu).to(mesh.device_type)


def _slices(mesh: DeviceMesh) -> nn.Module:
    return ContextGPT(mesh["cp"]).to(mesh.device_type)


_language_model = functools.partial(language_model, LAYERS)
KINDS = {
    "plain": Kind(("dp",), _plain, _language_model, data="dp"),
    "FSDP2": Kind(("dp_shard",), _plain, _language_model, data="dp_shard", sharded=True),
    "TP": Kind(("tp",), _parallel, _language_model),
    "FSDP2 and TP": Kind(("dp_shard", "tp"), _parallel, _language_model, data="dp_shard", sharded=True),
    "EP": Kind(("ep",), _experts, MixedModel, data="ep", experts=True),
    "CP": Kind(("cp",), _slices, ContextGPT, data="cp", sliced=True),
}


@dataclass
class Expected:
    """What one process has after each step."""

    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]

    @classmethod
    def of(cls, kind: Kind) -> Expected:
        model, found = kind.reference(), cls([], [], [])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(STEPS):
            x, target = kind.batch(step)
            optimizer.zero_grad()
            loss = kind.loss_fn(model(x), target)
            loss.backward()
            found.losses.append(loss.detach())
            found.grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            found.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return found


class Calls:
    """Counts how often blocks are called."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.count += 1
            return forward(*args)

        return call


def prepare(model: nn.Module, way: str, calls: Calls, **options: Any) -> None:
    """Let each block run in a way; of those that are not compiled, the calls are counted."""
    for block in model.blocks:
        if way == "compiled":
            for each in block.modules():
                if isinstance(each, RoutedExperts):
                    each.grouped = False  # Dynamo takes grouped products of bfloat16 alone
            block.compile(**(options or {"backend": sternway, "options": {"inner": "eager"}}))
            continue
        block.forward = calls.counted(block.forward)
        if way == "checkpointed":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def build(
    kind: Kind, mesh: DeviceMesh, schedule: str, way: str, calls: Calls, **options: Any
) -> tuple[Pipeline, set[nn.Module]]:
    """A pipeline, and the blocks of the whole model."""
    model = kind.make(mesh)
    prepare(model, way, calls, **options)
    blocks = set(model.blocks)

    def shard(stage: nn.Module) -> None:
        for each in list(stage.modules()):
            if each in blocks:
                fully_shard(each, mesh=mesh["dp_shard"])

    samples: dict[str, Tensor] = {}
    if kind.sharded or schedule == "auto":
        whole_rows = [each.to(mesh.device_type) for each in kind.batch(0)]
        given = mine(kind, mesh, 0) if kind.sliced else whole_rows
        samples["sample"], samples["sample_target"] = (each[:2] for each in given)
    pipe = Pipeline(
        model, mesh=mesh, schedule=schedule, n_microbatches=MICROBATCHES, loss_fn=kind.loss_fn,
        shard=shard if kind.sharded else None, data_dims=None if kind.data in (None, "cp") else [kind.data], **samples,
    )  # fmt: skip
    return pipe, blocks


def mine(kind: Kind, mesh: DeviceMesh, step: int) -> Batch:
    """The rows of this rank, or its slice of them."""
    batch = [each.to(mesh.device_type) for each in kind.batch(step)]
    if kind.data is not None:
        batch = [each.chunk(2, int(kind.sliced))[mesh.get_local_rank(kind.data)] for each in batch]
    return batch[0], batch[1]


def run_cell(
    kind: Kind, mesh: DeviceMesh, schedule: str, way: str, expected: Expected, close: dict[str, float]
) -> None:
    """Three optimizer steps, compared."""
    calls = Calls()
    pipe, blocks = build(kind, mesh, schedule, way, calls)
    inside = {id(each) for stage in pipe.stages.values() for each in stage.module.modules()}
    held = sum(id(block) in inside for block in blocks)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        x, target = mine(kind, mesh, step)
        calls.count = 0
        with counting() as counts:
            result = pipe.step(x, target=target, loss_everywhere=True)
        what = f"{schedule}, {way}, step {step}"
        if kind.sharded:
            assert set(counts.values()) == {held}, f"{what}: each block is gathered and reduced once, not {counts}"
        loss = result.loss.clone()
        if kind.data is not None and not kind.sliced:  # that of slices is the mean over all of them already
            dist.all_reduce(loss, group=mesh.get_group(kind.data))
            loss /= 2
        torch.testing.assert_close(loss.cpu(), expected.losses[step], **close)
        _compare(((name, p.grad) for name, p in pipe.named_parameters()), expected.grads[step], what, close)
        optimizer.step()
        optimizer.zero_grad()
        _compare(((name, p.detach()) for name, p in pipe.named_parameters()), expected.parameters[step], what, close)
    if way != "compiled":
        times = 2 if way == "checkpointed" else 1  # F, and once more in the backward
        assert calls.count == times * MICROBATCHES * held, f"{schedule}, {way}: {calls.count} calls of {held} blocks"
    pipe.close()


def _compare(found: Any, expected: dict[str, Tensor], what: str, close: dict[str, float]) -> None:
    for name, tensor in found:
        say = functools.partial("{}: {}: {}".format, what, name)
        torch.testing.assert_close(whole(tensor).cpu(), expected[name], **close, msg=say)


def run_row(rank: int, name: str, device: str, close: dict[str, float], cells: Cells) -> None:
    """The cells of a row."""
    kind = KINDS[name]
    mesh = init_device_mesh(device, (2,) * (1 + len(kind.dims)), mesh_dim_names=("pp", *kind.dims))
    expected = Expected.of(kind)
    for way, schedules in cells.items():
        for schedule in schedules:
            run_cell(kind, mesh, schedule, way, expected, close)
