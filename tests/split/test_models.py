"""Whole models: split equals a plain backward, as a middle stage and as the first one."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, gpt

from compare import assert_split_equals_backward, names
from sternway.demo import GPT

# What has to wait for W, whatever else does: the parameters whose gradient costs time.
WAITS = {
    "gpt": ("qkv.weight", "out.weight", "up.weight", "down.weight", "up.bias"),
    "llama": ("q.weight", "kv.weight", "out.weight", "gate.weight", "up.weight", "down.weight"),
    "convnet": ("conv1.weight", "conv2.weight", "0.weight", "0.bias"),
    "experts": ("up", "down", "router.weight"),
    "recurrent": ("gru.weight_ih_l0", "gru.weight_hh_l0"),
    "vit": ("patch.weight", "head.weight", "qkv.weight", "up.weight"),
}


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_backward(name: str, first_stage: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    pending = assert_split_equals_backward(
        model, torch.randn(shape, requires_grad=not first_stage), rtol=2e-4, atol=2e-5
    )
    deferred = names(model, pending.deferred)
    for suffix in WAITS[name]:
        wanted = {n for n, _ in model.named_parameters() if n == suffix or n.endswith("." + suffix)}
        assert wanted
        assert wanted <= deferred, f"not deferred: {sorted(wanted - deferred)}"


def test_a_gpt_from_tokens_to_loss() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=11, dim=16, heads=2, layers=2, length=6)
    tokens = torch.randint(0, 11, (3, 6))

    def loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    pending = assert_split_equals_backward(model, tokens, call=loss)
    assert {"tokens.weight", "positions.weight", "head.weight"} <= names(model, pending.deferred)


def test_norms_are_ready_and_only_they() -> None:
    model = gpt(16, 2)
    pending = assert_split_equals_backward(model, torch.randn(2, 5, 16, requires_grad=True))
    assert names(model, pending.ready) == {n for n, _ in model.named_parameters() if "norm" in n}
