"""The split on models that nobody here wrote: each gradient as a plain backward makes it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compare import assert_same_grads
from sternway import split
from zoo.entry import Entry, loss_of
from zoo.models import MODELS

EXACT = {"rtol": 1e-4, "atol": 1e-6}


def assert_same_buffers(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def split_and_compare(model: nn.Module, entry: Entry, **tolerance: float) -> None:
    reference = copy.deepcopy(model)
    batch, target = entry.data(4)
    for _ in range(2):  # the first gradient, and the adding to it
        expected = loss_of(reference, batch, target)
        expected.backward()
        loss = loss_of(model, batch, target)
        torch.testing.assert_close(loss, expected)
        _, pending = split.backward_input(loss, None, [])
        pending.run()
    assert_same_grads(model, reference, **tolerance or EXACT)
    assert_same_buffers(model, reference)


@pytest.mark.parametrize("name", MODELS)
def test_equals_a_plain_backward(name: str) -> None:
    split_and_compare(MODELS[name].make(), MODELS[name])


CHECKPOINTED = [name for name, entry in MODELS.items() if entry.family not in ("timm", "torchvision")]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_under_gradient_checkpointing(name: str) -> None:
    model = MODELS[name].make()
    if not getattr(model, "supports_gradient_checkpointing", getattr(model, "_supports_gradient_checkpointing", False)):
        pytest.skip("the model has no gradient checkpointing")
    if MODELS[name].family == "diffusion":
        model.enable_gradient_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    split_and_compare(model, MODELS[name])


@pytest.mark.parametrize("name", ["llama", "gpt2-tied", "mixtral", "bert", "t5-tied", "vit", "lora-llama", "dit"])
def test_under_bfloat16_autocast(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        split_and_compare(MODELS[name].make(), MODELS[name], rtol=1.6e-2, atol=1e-4)  # one bit of bfloat16
