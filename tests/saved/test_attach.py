"""A policy on a model: in each forward, whoever calls it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_grads
from sternway import saved
from sternway.errors import SavedError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def test_gradients_are_equal_and_tensors_move(tmp_path: Path) -> None:
    ours, x = model(), torch.randn(4, 8)
    theirs = copy.deepcopy(ours)
    attached = saved.offload(to="disk", directory=tmp_path, min_bytes=0).attach(ours)
    for _ in range(3):
        ours(x).square().mean().backward()
        theirs(x).square().mean().backward()
        assert attached.report is not None
        assert attached.report.moved_bytes > 0
    assert_same_grads(ours, theirs, rtol=0, atol=0)


def test_the_end_of_the_block_takes_it_off(tmp_path: Path) -> None:
    ours = model()
    with saved.compress("int8").attach(ours) as attached:
        ours(torch.randn(4, 8)).sum().backward()
        last = attached.report
    ours(torch.randn(4, 8)).sum().backward()
    assert attached.report is last


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


@pytest.mark.parametrize("hook_fails", [False, True])
def test_an_error_in_the_forward_closes_the_block(hook_fails: bool) -> None:
    ours = nn.Sequential(nn.Linear(8, 8), Fails())

    def fail(*_: object) -> None:
        raise ValueError("not today")

    if hook_fails:
        ours.register_forward_pre_hook(fail)  # before the policy's own
    saved.compress("int8").attach(ours)
    with pytest.raises(ValueError, match="not today"):
        ours(torch.randn(4, 8))
    with saved.keep() as report:  # a block of its own: no other is open
        nn.Linear(8, 8)(torch.randn(4, 8)).sum()
    assert report.ratio == 1


def test_a_model_is_needed() -> None:
    with pytest.raises(SavedError, match=r"model must be an nn\.Module"):
        saved.keep().attach("model")  # type: ignore[arg-type]
