"""A rank becomes slower by 30% in mid-run: how soon does "auto" run another plan, and is it as good as a fresh one?"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from asleep import AsleepBlock
from measure import Case, step_seconds
from torch import nn
from torch.nn import functional as F

from sternway.pipeline import Pipeline

SLOW_RANK, SLOWER = 1, 1.3


def _auto(case: Case, model: nn.Module) -> Pipeline:
    return Pipeline(model, schedule="auto", n_microbatches=case.microbatches, loss_fn=F.mse_loss)


def _slow_down(rank: int, model: nn.Module) -> None:
    for block in model.modules() if rank == SLOW_RANK else ():
        if isinstance(block, AsleepBlock):
            block.f, block.i, block.w = (SLOWER * seconds for seconds in (block.f, block.i, block.w))


def drift(rank: int, case: Case, path: str) -> None:
    """Run it on this rank; the first one writes what was found to a file."""
    x, target = case.batch()
    model, fresh = case.model(), case.model()
    with closing(_auto(case, model)) as pipe:
        for _ in range(case.all_steps):
            pipe.step(x, target=target)
        usual = step_seconds(pipe, x, target, case.steps)
        changed_at = case.all_steps + case.steps + 1
        _slow_down(rank, model)
        for _ in range(case.all_steps):
            pipe.step(x, target=target)
        tried = [plan for plan in pipe.plans if plan.step >= changed_at]
        pipe.stop_tuning()
        adapted = step_seconds(pipe, x, target, case.steps)
        story = [str(plan) for plan in pipe.plans]
    _slow_down(rank, fresh)
    with closing(_auto(case, fresh)) as pipe:
        for _ in range(case.all_steps):
            pipe.step(x, target=target)
        pipe.stop_tuning()
        from_start = step_seconds(pipe, x, target, case.steps)
    found: dict[str, Any] = {
        "ranks": case.ranks,
        "asleep_ms": 1e3 * case.asleep,
        "usual_ms": 1e3 * usual,
        "adapted_ms": 1e3 * adapted,
        "from_start_ms": 1e3 * from_start,
        "adapted_over_from_start": adapted / from_start,
        "steps_until_another_plan": tried[0].step - changed_at if tried else "none was planned to be faster",
        "story": story,
    }
    if rank == 0:
        Path(path).write_text(json.dumps(found))
