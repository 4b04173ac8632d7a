"""What a rank of a pipeline holds while "auto" tries plans, counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sternway._torch.memory import OperationCounter
from sternway.pipeline import Pipeline


def held_while_plans_are_tried(pipe: Pipeline, alone: nn.Module, x: Tensor) -> int:
    """The most bytes in 23 steps with the gradients of ``alone``: parameters, gradients and AdamW's state included."""
    F.mse_loss(alone(x), x).backward()
    reference = dict(alone.named_parameters())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.0)
    pipe.step(x, target=x)
    optimizer.step()
    with OperationCounter() as counter:
        for number in range(24):
            for parameter in pipe.parameters():
                parameter.grad.zero_()
            pipe.step(x, target=x)
            if number == 0:  # now it knows what was there before
                before = counter.peak = counter.now
                continue
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)
    return 4 * sum(parameter.nbytes for parameter in pipe.parameters()) + counter.peak - before
