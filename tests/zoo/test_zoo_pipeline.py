"""Models that nobody here wrote, unmodified, through a pipeline: the loss, gradients and buffers of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sternway.pipeline import LocalTransport, Pipeline
from zoo.entry import Entry, loss_fn, plain_step
from zoo.models import MODELS

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "auto")
ROWS, MICROBATCHES = 4, 2
EXACT = {"rtol": 2e-4, "atol": 2e-6}


def assert_step_equals_backward(
    entry: Entry, model: nn.Module, schedule: str, *, ranks: int = 2, **tolerance: float
) -> Pipeline:
    """Two steps of a pipeline in one process, against two plain ones; the gradients add up."""
    reference = copy.deepcopy(model)
    batch, target = entry.data(ROWS)
    pipe = Pipeline(
        model, schedule=schedule, ranks=ranks, n_microbatches=MICROBATCHES, transport=LocalTransport(),
        loss_fn=None if target is None else loss_fn, sample=microbatch(entry),
    )  # fmt: skip
    for _ in range(2):
        expected = plain_step(entry, reference, ROWS, MICROBATCHES)
        result = pipe.step(**batch) if target is None else pipe.step(**batch, target=target)
        assert_close("the loss", result.loss, expected, **tolerance or EXACT)
    compare_with(pipe, reference, **tolerance or EXACT)
    return pipe


def microbatch(entry: Entry) -> dict[str, object]:
    return entry.data(ROWS // MICROBATCHES)[0]


def compare_with(pipe: Pipeline, reference: nn.Module, *, whole: bool = True, **tolerance: float) -> None:
    """The pipeline's gradients and buffers are those of ``reference``; all of them, if it is here whole."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    found = dict(pipe.named_parameters())
    for name, parameter in found.items():
        grad = expected[name].grad
        if parameter.grad is None or grad is None:  # a tie makes zeros of nothing
            other = grad if parameter.grad is None else parameter.grad
            assert other is None or not other.any(), f"{name}: {parameter.grad} against {grad}"
        else:
            assert_close(name, parameter.grad, grad, **tolerance)
    if whole:
        held = {id(expected[name]) for name in found}
        assert all(id(p) in held for p in expected.values() if p.grad is not None)
    buffers = dict(reference.named_buffers(remove_duplicate=False))
    for name, tensor in pipe.state_dict().items():
        if name in buffers:
            assert_close(name, tensor, buffers[name])


def assert_close(name: str, ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_equals_a_plain_backward(name: str, schedule: str) -> None:
    assert_step_equals_backward(MODELS[name], MODELS[name].make(), schedule)
