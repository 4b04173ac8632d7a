"""What composes with what, on gloo: the cells of ``docs/composing.md``. ``STERNWAY_MATRIX=whole`` runs all of them."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from gloo import on_ranks
from matrix_cases import KINDS, SCHEDULES, WAYS, Calls, Cells, build, mine, run_row
from sternway._torch.async_tensors import DROPPED
from sternway.errors import PipelineError

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
WHOLE = os.environ.get("STERNWAY_MATRIX") == "whole"
ALL: Cells = dict.fromkeys(WAYS, SCHEDULES)
CHOSEN: dict[str, Cells] = {  # a compiler takes most of a minute on two cores
    "plain": {"eager": SCHEDULES, "checkpointed": ("1f1b", "zb-v"), "compiled": ("1f1b",)},
    "FSDP2": {"eager": SCHEDULES, "checkpointed": ("1f1b", "zb-v")},
    "TP": {"eager": SCHEDULES, "checkpointed": ("zb-h1",), "compiled": ("zb-v",)},
    "EP": {"eager": SCHEDULES, "checkpointed": ("1f1b", "zb-v")},
    "CP": {"eager": SCHEDULES, "checkpointed": ("zb-v",), "compiled": ("zb-h1",)},
}


@pytest.mark.parametrize("name", KINDS if WHOLE else CHOSEN)
def test_what_composes(name: str) -> None:
    cells, timeout = (ALL, 1500) if WHOLE else (CHOSEN[name], 240)
    on_ranks(KINDS[name].ranks, run_row, name, "cpu", CLOSE, cells, timeout=timeout)


def _dropped(rank: int) -> None:
    """The first block gets the embedding's result while its collective is under way."""
    kind = KINDS["TP"]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    x, target = mine(kind, mesh, 0)
    for schedule in ("1f1b", "zb-h1"):  # a whole backward, and one that is split
        pipe, _ = build(kind, mesh, schedule, "compiled", Calls(), backend="aot_eager")
        with pytest.raises(PipelineError, match=DROPPED["rule"]):
            pipe.step(x, target=target)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch compiles for such an input as it is")
def test_gradients_that_other_backends_drop_are_not_lost_in_silence() -> None:
    on_ranks(2, _dropped)
