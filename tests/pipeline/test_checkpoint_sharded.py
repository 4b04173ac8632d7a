"""Checkpoints of sharded parameters: written on one mesh, read on others, and by programs that know torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gloo import on_ranks
from parallel_models import LENGTH, VOCABULARY, ShardedBlock, language_model, put_on, token_loss, whole
from sternway._torch.dtensors import local_part
from sternway.pipeline import Pipeline

LAYERS, SAVED_AT, STEPS = 4, 2, 4
CLOSE = 1e-5  # to other orders of sums


def _batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))


def _pipe(schedule: str, how: str) -> tuple[Pipeline, torch.optim.Optimizer]:
    """A pipeline of two ranks whose stages are sharded over two, or, if ``how`` is "plain", one over all ranks."""
    model: nn.Module = language_model(LAYERS)
    options: dict[str, Any] = {}
    if how != "plain":
        options["mesh"] = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", how))
    if how == "tp":
        model = put_on(model, mesh["tp"], sequence=True)
    elif how == "dp_shard":

        def shard(stage: nn.Module) -> None:
            for each in stage.modules():
                if isinstance(each, ShardedBlock | nn.Embedding):
                    fully_shard(each, mesh=mesh["dp_shard"])

        # Cut by name: by measured times, a run and the one that resumes it may have other stages.
        options |= {"shard": shard, "sample": _batch(0)[:2], "cuts": [f"blocks.{LAYERS // 2}"]}
    pipe = Pipeline(model, schedule=schedule, n_microbatches=4, loss_fn=token_loss, **options)
    return pipe, torch.optim.AdamW(pipe.parameters(), 1e-2, eps=1e-3)


def _train(pipe: Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = _batch(step)
        losses.append(float(pipe.step(tokens, target=tokens, loss_everywhere=True, record=False).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _expected() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """One process, trained to the same step; and the losses of those that follow."""
    model = language_model(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    after = []
    for step in range(STEPS):
        tokens = _batch(step)
        loss = token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= SAVED_AT:
            after.append(float(loss.detach()))
    return model, optimizer, after


def _saves(rank: int, directory: str, how: str) -> None:
    pipe, optimizer = _pipe("zb-h1", how)
    _train(pipe, optimizer, 0, SAVED_AT)
    saving = pipe.save(directory, optimizer, SAVED_AT, wait=False)
    losses = _train(pipe, optimizer, SAVED_AT, STEPS)  # while it is written
    saving.wait()
    assert losses == pytest.approx(_expected()[2], rel=CLOSE)
    torch.save((losses, _here(pipe)), Path(directory) / f"end-{rank}.pt")
    pipe.close()


def _here(pipe: Pipeline) -> dict[str, Tensor]:
    """What this process holds of the parameters."""
    return {name: local_part(parameter).clone() for name, parameter in pipe.named_parameters()}


def _goes_on(rank: int, directory: str, how: str) -> None:
    """Resumed where it was saved: every bit of what follows is that of the run that was not interrupted."""
    pipe, optimizer = _pipe("zb-h1", how)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    pipe.resume(directory, optimizer)
    losses, parameters = torch.load(Path(directory) / f"end-{rank}.pt")
    assert _train(pipe, optimizer, SAVED_AT, STEPS) == losses
    for name, value in _here(pipe).items():
        assert torch.equal(value, parameters[name]), name
    pipe.close()


def _resumes(rank: int, directory: str, schedule: str, how: str) -> None:
    pipe, optimizer = _pipe(schedule, how)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    assert pipe.resume(directory, optimizer).step == SAVED_AT
    for parameter, state in optimizer.state.items():
        assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
    assert _train(pipe, optimizer, SAVED_AT, STEPS) == pytest.approx(_expected()[2], rel=CLOSE)
    pipe.close()


def _newest(directory: str) -> Path:
    return Path(directory) / f"step-{SAVED_AT:08d}"


def _foreign(rank: int, directory: str) -> None:
    """FSDP2 on four processes, with torch.distributed.checkpoint alone."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(9)
    model: Any = language_model(LAYERS)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=_newest(directory))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    losses = []
    for step in range(SAVED_AT, STEPS):
        tokens = _batch(step)
        loss = token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(_expected()[2], rel=CLOSE)


def _one_process(rank: int, directory: str) -> None:
    """A plain model and a plain optimizer, with torch.distributed.checkpoint alone."""
    model = language_model(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=_newest(directory))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    tokens = _batch(SAVED_AT)
    assert float(token_loss(model(tokens), tokens).detach()) == pytest.approx(_expected()[2][0], rel=CLOSE)


@pytest.mark.parametrize("how", ["tp", "dp_shard"])
def test_two_by_two_to_other_meshes_and_programs(tmp_path: Path, how: str) -> None:
    on_ranks(4, _saves, str(tmp_path), how)
    on_ranks(4, _goes_on, str(tmp_path), how)
    on_ranks(4, _resumes, str(tmp_path), "1f1b", "tp" if how == "dp_shard" else "dp_shard")
    on_ranks(4, _resumes, str(tmp_path), "zb-h1", "plain")
    on_ranks(1, _resumes, str(tmp_path), "1f1b", "plain")
    on_ranks(4, _foreign, str(tmp_path))
    on_ranks(1, _one_process, str(tmp_path))


def _stateful(rank: int, directory: str) -> None:
    """A pipeline is ``Stateful``, and its stages' modules are what ``get_model_state_dict`` takes."""
    pipe, _ = _pipe("zb-v", "tp")
    assert isinstance(pipe, Stateful)
    dcp.save({"model": pipe}, checkpoint_id=directory)
    before = {name: whole(value).clone() for name, value in pipe.state_dict().items()}
    for stage in pipe.stages.values():
        found = get_model_state_dict(stage.module)
        assert found.keys() == stage.module.state_dict().keys()
        assert found.keys() <= before.keys()
        set_model_state_dict(stage.module, found)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    dcp.load({"model": pipe}, checkpoint_id=directory)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(whole(value), before[name], rtol=0, atol=0)
    pipe.load_state_dict(language_model(LAYERS).state_dict())  # of the whole model, on every process
    expected = language_model(LAYERS).state_dict()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(whole(value), expected[name], rtol=0, atol=0)
    pipe.close()


def _whole_again(rank: int, directory: str) -> None:
    model = language_model(LAYERS)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    dcp.load({"model": model.state_dict()}, checkpoint_id=directory)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_pipeline_is_stateful(tmp_path: Path) -> None:
    on_ranks(4, _stateful, str(tmp_path / "model"))
    on_ranks(1, _whole_again, str(tmp_path / "model"))


def _same_names(rank: int, directory: str) -> None:
    stages = {rank: nn.Linear(4, 4), 3 - rank: nn.Linear(4, 4)}
    pipe = Pipeline(stages, schedule="zb-v", n_microbatches=2, loss_fn=nn.functional.mse_loss)
    names = {f"{index}.{name}" for index in stages for name in ("weight", "bias")}
    assert pipe.state_dict().keys() == dict(pipe.named_parameters()).keys() == names
    dcp.save({"model": pipe}, checkpoint_id=directory)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    dcp.load({"model": pipe}, checkpoint_id=directory)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    pipe.close()


def test_stages_with_the_same_names_are_told_apart(tmp_path: Path) -> None:
    on_ranks(2, _same_names, str(tmp_path))
