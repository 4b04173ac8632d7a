"""Steps of a pipeline over processes beside plain backwards, for the models of ``model_cases.py``.

Each function is called on every rank with the rank, the number of ranks and the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_cases import Decoder, EncoderDecoder, Unet, pairs, pictures, text
from sternway.errors import PipelineError
from sternway.pipeline import Pipeline
from sternway.pipeline.step._random import seed_forward, step_seed

CLOSE = {"rtol": 2e-3, "atol": 5e-5}
MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """A model, its data, and the schedules it is run with."""

    model: Callable[[], nn.Module]
    data: Callable[[int, str], dict[str, Tensor]] = text
    schedules: tuple[str, ...] = ("zb-h1",)
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None  # of autocast
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "decoder": Case(Decoder, schedules=("1f1b", "zb-h1", "zb-v", "auto")),
    "encoder and decoder": Case(EncoderDecoder, pairs, ("1f1b", "zb-v")),
    "u-net": Case(Unet, pictures, ("zb-v", "auto"), F.mse_loss),
    "checkpoints": Case(lambda: Decoder(checkpoints=True), schedules=("zb-v",)),
    "adapters": Case(lambda: Decoder(adapters=True), schedules=("auto",)),
    "autocast": Case(Decoder, dtype=torch.bfloat16),
}


def run_case(rank: int, ranks: int, device: str, name: str, schedule: str) -> None:
    """Three steps, with other shapes in the last, equal plain backwards of whole batches; so does an evaluation."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().to(device)
    reference = copy.deepcopy(model)
    sample = case.data(2, device) if rank == 0 else None
    pipe = Pipeline(model, schedule=schedule, n_microbatches=MICROBATCHES, loss_fn=case.loss_fn, sample=sample)
    assert pipe.transport.device.type == device
    for number, rows in enumerate((8, 8, 11)):
        torch.manual_seed(number)  # only one rank drew numbers for the sample
        batch = case.data(rows, device)
        target = batch["x"].tanh() if case.loss_fn is not None else None
        with nullcontext() if case.dtype is None else torch.autocast(device, case.dtype):
            given = batch if rank == 0 else {}  # the others get from the first stage what they need
            result = pipe.step(**given, target=target, loss_everywhere=True)
            expected = loss_of(reference, batch, target)
        expected.backward()
        close = CLOSE if case.dtype is None else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(result.loss, expected.detach(), **close)
        assert_part_has_same_grads(pipe, reference, None if case.dtype is None else 2e-2)
    if case.dtype is None:
        assert_evaluates(pipe, reference.eval(), batch if rank == 0 else {}, batch, target)
    pipe.close()


def loss_of(model: nn.Module, batch: dict[str, Tensor], target: Tensor | None) -> Tensor:
    output = model(**batch)
    if target is not None:
        return F.mse_loss(output, target)
    return output[0] if isinstance(output, tuple) else output.loss


def assert_part_has_same_grads(pipe: Pipeline, reference: nn.Module, of_norm: float | None = None) -> None:
    """This rank's parameters have the gradients of plain autograd, by entries or by the norm of the difference."""
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    ours = dict(pipe.named_parameters())
    assert ours
    for name, parameter in ours.items():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is None:
            continue
        if of_norm is None:
            torch.testing.assert_close(parameter.grad, expected, msg=lambda t, name=name: f"{name}: {t}", **CLOSE)
        else:
            assert (parameter.grad - expected).norm() <= of_norm * expected.norm() + 1e-4, name


def assert_evaluates(
    pipe: Pipeline, reference: nn.Module, given: dict[str, Tensor], batch: dict[str, Tensor], target: Tensor | None
) -> None:
    """The loss is on every rank, and the outputs, on the last, are those of the batch."""
    result = pipe.evaluate(**given, target=target)
    with torch.no_grad():
        expected, loss = reference(**batch), loss_of(reference, batch, target)
    torch.testing.assert_close(result.loss, loss, **CLOSE)
    assert all(stage.module.training for stage in pipe.stages.values())
    if pipe.schedule.num_stages - 1 in pipe.stages:
        assert type(result.outputs) is type(expected)
        torch.testing.assert_close(result.outputs, expected, rtol=2e-3, atol=2e-4)
    else:
        assert result.outputs is None
    without = {name: value for name, value in given.items() if name != "labels"}
    assert pipe.evaluate(**without).loss is None


def run_dropout(rank: int, ranks: int, device: str) -> None:
    """What is dropped depends on the step, the stage and the microbatch: seed a plain forward so, too."""
    torch.manual_seed(0)
    model = Decoder(drop=0.3).to(device)
    reference = copy.deepcopy(model)
    cuts = [f"layers.{1 + place}" for place in range(2 * ranks - 1)]
    sample = text(2, device) if rank == 0 else None
    pipe = Pipeline(model, schedule="zb-v", n_microbatches=MICROBATCHES, sample=sample, cuts=cuts)
    torch.manual_seed(3)
    batch = text(8, device)
    seed, place = step_seed(0), pipe.transport.device
    pipe.step(**(batch if rank == 0 else {}))
    counted = (batch["labels"][:, 1:] != -100).sum()
    for number in range(MICROBATCHES):
        part = {name: value.chunk(MICROBATCHES)[number] for name, value in batch.items()}
        hooks = [
            reference.get_submodule(name).register_forward_pre_hook(
                lambda *_, stage=stage, number=number: seed_forward(seed, stage, number, place)
            )
            for stage, name in enumerate(["tokens", *cuts])
        ]
        (reference(**part).loss * (part["labels"][:, 1:] != -100).sum() / counted).backward()
        for hook in hooks:
            hook.remove()
    assert_part_has_same_grads(pipe, reference)
    assert_evaluates(pipe, reference.eval(), batch if rank == 0 else {}, batch, None)
    pipe.close()


def run_weights(rank: int, ranks: int, device: str) -> None:
    """A model on the meta device: each rank asks for its own tensors alone."""
    torch.manual_seed(0)
    reference = Decoder().to(device)
    whole = reference.state_dict()
    with torch.device("meta"):
        model = Decoder()
    asked: list[str] = []

    def weights(names: Any) -> dict[str, Tensor]:
        asked.extend(names)
        return {name: whole[name].cpu() for name in names}

    sample = text(2, "cpu") if rank == 0 else None
    pipe = Pipeline(model, schedule="zb-h1", n_microbatches=MICROBATCHES, sample=sample, weights=weights, device=device)
    assert 0 < len(asked) < len(whole)
    assert all(parameter.device.type == device for parameter in pipe.parameters())
    torch.manual_seed(1)
    batch = text(8, device)
    pipe.step(**(batch if rank == 0 else {}))
    reference(**batch).loss.backward()
    assert_part_has_same_grads(pipe, reference)
    pipe.close()


def mean_of_labels(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten())


def run_uneven_targets(rank: int, ranks: int, device: str) -> None:
    """A mean over uneven targets is refused on every rank; on a GPU at the end of the step, or in the next call."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    batch = text(8, device)
    target = batch.pop("labels")
    sample = {name: value[:2] for name, value in batch.items()} if rank == 0 else None
    pipe = Pipeline(model, schedule="1f1b", n_microbatches=MICROBATCHES, loss_fn=mean_of_labels, sample=sample)
    even = target.where(target != -100, 1)
    pipe.step(**batch, target=even)
    steps = (pipe.step(**batch, target=target) for _ in range(50))
    with pytest.raises(PipelineError, match="not spread evenly"):
        list(steps)


def run_all(rank: int, ranks: int, device: str, said: Callable[..., Any]) -> None:
    """Everything in one start of processes."""
    for name, case in CASES.items():
        for schedule in case.schedules:
            with said(rank, f"{ranks} ranks, {name}, {schedule}"):
                run_case(rank, ranks, device, name, schedule)
    for run in (run_dropout, run_weights, run_uneven_targets):
        with said(rank, f"{ranks} ranks, {run.__name__}"):
            run(rank, ranks, device)
