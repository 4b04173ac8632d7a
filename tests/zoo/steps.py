"""One comparison for all tests of the zoo's pipelines: steps of a pipeline against plain backwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sternway.pipeline import LocalTransport, Pipeline
from zoo.entry import Entry, given_loss, loss_fn, plain_step

ROWS, MICROBATCHES = 4, 2
EXACT = {"rtol": 2e-4, "atol": 2e-6}


def make_pipeline(entry: Entry, model: nn.Module, schedule: str, **options: Any) -> Pipeline:
    """A pipeline of the unmodified model, with its own loss if it has one."""
    loss = loss_fn if entry.target is not None else given_loss if entry.refused is not None else None
    sample = entry.data(ROWS // MICROBATCHES)[0]
    return Pipeline(model, schedule=schedule, n_microbatches=MICROBATCHES, loss_fn=loss, sample=sample, **options)


def in_one_process(entry: Entry, model: nn.Module, schedule: str, **options: Any) -> Pipeline:
    return make_pipeline(entry, model, schedule, ranks=2, transport=LocalTransport(), **options)


def step(entry: Entry, pipe: Pipeline) -> Tensor:
    """A step with the entry's batch; the loss, on every rank."""
    batch, target = entry.data(ROWS)
    if entry.refused is not None:
        target = torch.zeros(ROWS)  # the model's own loss needs none
    loss = pipe.step(**batch, target=target, loss_everywhere=True).loss
    assert loss is not None
    return loss


def assert_steps_equal(pipe: Pipeline, entry: Entry, reference: nn.Module, **tolerance: float) -> None:
    """Two steps, so that gradients add up: losses, gradients and buffers are those of ``reference``.

    In one process of several, the pipeline has only a part of these.
    """
    tolerance = tolerance or EXACT
    for _ in range(2):
        expected = plain_step(entry, reference, ROWS, MICROBATCHES)
        assert_close("the loss", step(entry, pipe), expected, **tolerance)
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    ours = dict(pipe.named_parameters())
    for name, parameter in ours.items():
        assert_same_grad(name, parameter.grad, theirs[name].grad, **tolerance)
    if not pipe.transport.mine:
        here = {id(theirs[name]) for name in ours}
        assert all(id(parameter) in here for parameter in theirs.values() if parameter.grad is not None)
    buffers = dict(reference.named_buffers(remove_duplicate=False))
    for name, tensor in pipe.state_dict().items():
        if name in buffers:
            assert_close(name, tensor, buffers[name])


def assert_same_grad(name: str, ours: Tensor | None, theirs: Tensor | None, **tolerance: float) -> None:
    if ours is None or theirs is None:  # a tie of parameters that no loss depends on is zero
        found = theirs if ours is None else ours
        assert found is None or not found.any(), f"{name}: {ours} against {theirs}"
    else:
        assert_close(name, ours, theirs, **tolerance)


def assert_close(name: str, ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{name}: {text}", **tolerance)


def assert_pipeline_equals_backward(entry: Entry, model: nn.Module, schedule: str, **tolerance: float) -> Pipeline:
    """The whole comparison in one process."""
    reference = copy.deepcopy(model)
    pipe = in_one_process(entry, model, schedule)
    assert_steps_equal(pipe, entry, reference, **tolerance)
    return pipe
