"""Slices of sequences on the ranks of a mesh dimension: losses, gradients and steps equal one process's.

Schedules, recomputation and compilation are a row of ``test_matrix.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from context_models import ContextGPT, context_batch, counted_loss, mean_loss, slice_of
from gloo import on_ranks
from parallel_models import whole
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import GradScaler, Pipeline

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
STEPS = 3


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))


def _pipe(mesh: DeviceMesh, way: str = "heads", **options: Any) -> Pipeline:
    options = {"schedule": "zb-h1", "n_microbatches": 4, "loss_fn": mean_loss, "mesh": mesh} | options
    return Pipeline(ContextGPT(mesh["cp"], way), **options)


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)


def _counted_mean(logits: Tensor, labels: Tensor) -> Tensor:
    total, count = counted_loss(logits, labels)
    return total / count


def _assert_steps_equal(pipe: Pipeline, mesh: DeviceMesh, masked: bool, rows: Callable[[Tensor], Tensor]) -> None:
    """Three clipped steps of the pipeline and of one process that has all rows and whole sequences."""
    reference = ContextGPT()
    ours, theirs = _sgd(pipe), _sgd(reference)
    expected = dict(reference.named_parameters())
    for step in range(STEPS):
        tokens, labels = context_batch(step, masked=masked)
        loss = _counted_mean(reference(tokens), labels)
        loss.backward()
        x, target = slice_of((rows(tokens), rows(labels)), mesh["cp"])
        result = pipe.step(x, target=target, loss_everywhere=True)
        if rows(tokens).shape == tokens.shape:  # else it is the loss of some rows
            torch.testing.assert_close(result.loss, loss.detach(), **CLOSE)
            with torch.no_grad():
                torch.testing.assert_close(pipe.evaluate(x, target=target).loss, loss.detach(), **CLOSE)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), expected[name].grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.1), norm, **CLOSE)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach(), **CLOSE)


def _uneven_counts(rank: int) -> None:
    mesh = _mesh()
    for schedule, way in (("zb-v", "gather"), ("1f1b", "heads")):
        pipe = _pipe(mesh, way, schedule=schedule, loss_fn=counted_loss)
        _assert_steps_equal(pipe, mesh, masked=True, rows=lambda each: each)
        pipe.close()
    pipe = _pipe(mesh, "swap")  # one number, the mean of a slice
    _assert_steps_equal(pipe, mesh, masked=False, rows=lambda each: each)
    pipe.close()


def test_uneven_counts_keys_gathered_and_norms() -> None:
    """Most labels that count are in the second slice. A norm counts each parameter once."""
    on_ranks(4, _uneven_counts)


def _sharded(rank: int) -> None:
    """A unit for each block, over the dimensions of rows and slices together; the pipeline averages the rest."""
    for sizes in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_shard", "cp"))
        over = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        model = ContextGPT(mesh["cp"])
        blocks = set(model.blocks)

        def shard(stage: nn.Module, blocks: set[nn.Module] = blocks, over: DeviceMesh = over) -> None:
            for each in list(stage.modules()):
                if each in blocks:
                    fully_shard(each, mesh=over)

        sample, _ = slice_of(context_batch(0, 2), mesh["cp"])
        pipe = Pipeline(
            model, mesh=mesh, schedule="zb-h1", n_microbatches=2, loss_fn=counted_loss, shard=shard, sample=sample
        )
        copies, copy = sizes[1], mesh.get_local_rank("dp_shard")
        _assert_steps_equal(pipe, mesh, False, lambda each, n=copies, copy=copy: each.chunk(n)[copy])
        pipe.close()


def test_fsdp2_over_rows_and_slices() -> None:
    on_ranks(4, _sharded)


def _beside_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "tp", "cp"))
    model = ContextGPT(mesh["cp"])
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = Pipeline(model, mesh=mesh, schedule="zb-h1", n_microbatches=2, loss_fn=counted_loss)
    _assert_steps_equal(pipe, mesh, masked=True, rows=lambda each: each)
    pipe.close()


def test_beside_tensor_parallelism() -> None:
    on_ranks(4, _beside_tensor_parallel)


def _recomputed(rank: int) -> None:
    """A limit in bytes, for which some blocks run again, with their collectives."""
    mesh = _mesh()
    x, target = slice_of(context_batch(0, 2), mesh["cp"])
    options: dict[str, Any] = {"schedule": "1f1b", "sample": x, "sample_target": target}
    pipe = _pipe(mesh, "swap", memory="44KB", loss_fn=counted_loss, **options)
    assert pipe.schedule.recompute
    _assert_steps_equal(pipe, mesh, masked=True, rows=lambda each: each)
    pipe.close()


def test_within_a_limit_in_bytes() -> None:
    on_ranks(4, _recomputed)


def _scaled(rank: int) -> None:
    """One slice's gradient is infinite: all ranks leave the step out."""
    mesh = _mesh()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    pipe, reference = _pipe(mesh, scaler=scaler), ContextGPT()
    ours, theirs = _sgd(pipe), _sgd(reference)
    expected = dict(reference.named_parameters())
    tokens, labels = context_batch(0)
    x, target = slice_of((tokens, labels), mesh["cp"])
    for bad in (False, True):
        if bad and rank == 3:
            next(iter(pipe.parameters())).register_hook(lambda grad: grad * torch.inf)
        pipe.step(x, target=target)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if not bad:
            mean_loss(reference(tokens), labels).backward()
            theirs.step()
        assert scaler.get_scale() == (4.0 if bad else 8.0)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name].detach(), **CLOSE)
    pipe.close()


def test_scaled_losses() -> None:
    on_ranks(4, _scaled)


def _saves(rank: int, directory: str) -> None:
    mesh = _mesh()
    pipe = _pipe(mesh)
    optimizer = _sgd(pipe)
    x, target = slice_of(context_batch(0), mesh["cp"])
    pipe.step(x, target=target)
    optimizer.step()
    optimizer.zero_grad()
    pipe.save(directory, optimizer, 1)
    later = [pipe.step(x, target=target, loss_everywhere=True).loss]
    assert pipe.resume(directory, optimizer).step == 1
    assert torch.equal(pipe.evaluate(x, target=target).loss, later[0])
    pipe.close()
    if rank == 0:
        torch.save(later[0], Path(directory, "loss"))


def test_a_checkpoint_has_each_tensor_once_and_one_process_loads_it(tmp_path: Path) -> None:
    on_ranks(4, _saves, str(tmp_path))
    (folder,) = tmp_path.glob("step-*")
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")["model"]
    once = sum(each.nbytes for each in state.values())
    stored = FileSystemReader(folder).read_metadata().storage_data.values()
    files = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert sum(files.values()) == sum(each.length for each in stored), "what is written, is written once"
    assert once == sum(parameter.nbytes for parameter in ContextGPT().parameters())
    model = ContextGPT()
    model.load_state_dict(state)
    tokens, labels = context_batch(0)
    with torch.no_grad():
        torch.testing.assert_close(mean_loss(model(tokens), labels), torch.load(tmp_path / "loss"), **CLOSE)


def _shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _sum_of_positions(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1).mean()


def _rows_counted(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return counted_loss(logits, labels)[0], len(labels)


class _OwnLoss(ContextGPT):
    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": mean_loss(super().forward(tokens), labels)}


def _losses_that_do_not_add_up(rank: int) -> None:
    mesh = _mesh()
    tokens, labels = context_batch(0)
    x, target = slice_of((tokens, labels), mesh["cp"])
    half = torch.where(torch.arange(labels.shape[1]) < labels.shape[1] // 2, labels, -100)
    for loss_fn, goal, match in (
        (mean_loss, slice_of((tokens, half), mesh["cp"])[1], r"not spread evenly over the slices .* \(sum, count\)"),
        (mean_loss if rank % 2 else counted_loss, target, r"for all slices of a sequence, or one number for all"),
        (_shifted, target, "mean over the positions.* shift labels before"),
        (_sum_of_positions, target, "mean over the positions"),
        (_rows_counted, target, "must add up over positions"),
    ):
        pipe = _pipe(mesh, loss_fn=loss_fn)
        with pytest.raises((PipelineError, LostRankError), match=match):
            pipe.step(x, target=goal)
    own = Pipeline(_OwnLoss(mesh["cp"]), schedule="1f1b", n_microbatches=2, mesh=mesh)
    with pytest.raises((PipelineError, LostRankError), match="cannot compute its own loss from a slice"):
        own.step(tokens=x, labels=target)


def test_losses_that_do_not_add_up_are_refused_on_every_rank() -> None:
    on_ranks(4, _losses_that_do_not_add_up)


def _bad_input(rank: int) -> None:
    mesh = _mesh()
    place = mesh.get_local_rank("cp")
    tokens, labels = context_batch(0)
    x, target = slice_of((tokens, labels), mesh["cp"])
    pipe = _pipe(mesh)
    seven = tokens[:, :7].chunk(2, 1)[place]
    with pytest.raises(PipelineError, match=r"slices of one shape; got step with .*\(8, 3\).* multiple of 2 positions"):
        pipe.step(seven, target=seven)
    with pytest.raises(PipelineError, match=r"must be called alike.* evaluate"):
        (pipe.evaluate if place else pipe.step)(x, target=target)
    with pytest.raises(PipelineError, match=r"cannot be cut along dimension 0.*\(on rank 1\)"):
        pipe.step(x[: 3 if place else 8], target=target)
    pipe.step(x, target=target)  # nobody had begun
    pipe.close()
    with pytest.raises(PipelineError, match=r"cp_dim must be the name of a dimension of the mesh.* 'context'"):
        _pipe(mesh, cp_dim="context")
    with pytest.raises(PipelineError, match=r"slices of one shape on all processes .* no tensors on rank"):
        _pipe(mesh, schedule="auto", sample=x[:2] if place else None)
    model = ContextGPT(mesh["cp"])
    with torch.no_grad():
        model.head.weight += rank == 3
    with pytest.raises(PipelineError, match=r"same weights on every rank.* head\.weight on rank 3"):
        Pipeline(model, schedule="1f1b", n_microbatches=2, loss_fn=mean_loss, mesh=mesh)
    stage = nn.Linear(4, 4)
    with torch.no_grad():
        stage.weight += rank == 3
    with pytest.raises(PipelineError, match="stage 1 must have the same weights on all processes that get other data"):
        Pipeline({rank // 2: stage}, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh)
    dist.barrier()


def test_bad_input_is_an_error_on_every_rank() -> None:
    on_ranks(4, _bad_input)


def _another_name(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("context", "pp"))
    reference, model = ContextGPT(layers=2), ContextGPT(mesh["context"], layers=2)
    pipe = Pipeline(model, schedule="1f1b", n_microbatches=2, loss_fn=counted_loss, mesh=mesh, cp_dim="context")
    tokens, labels = context_batch(0, masked=True)
    x, target = slice_of((tokens, labels), mesh["context"])
    pipe.step(x, target=target)
    _counted_mean(reference(tokens), labels).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, **CLOSE)
    pipe.close()


def test_a_dimension_of_another_name() -> None:
    on_ranks(2, _another_name)
