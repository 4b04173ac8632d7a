"""An optimizer step taken before all ranks know that it was right to take it.

Whether gradients are finite, and their norm for clipping, are known only when every rank's backward is done; to wait
for that costs every rank the others' time. The zero-bubble paper [1] has each rank take the step at once, tell its
share with the exchange that opens the next step, and roll back what turns out wrong. So it is here; but where the paper
undoes the arithmetic, a copy is kept, so that nothing of a step that was rolled back remains, to the bit.

[1] Qi et al., Zero Bubble Pipeline Parallelism, section 4: https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sternway.errors import PipelineError

Policy = Literal["raise", "skip"]


class Trial:
    """A step that was taken, and the way back.

    Args:
        optimizer: takes the step; gradients are taken away from its parameters.
        square: this process's share of the gradients' squared norm.
        max_norm: what the norm may be.
        policy: what is to happen where gradients are not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, square: Tensor, max_norm: float | None, policy: Policy
    ) -> None:
        self.policy = policy
        self._optimizer, self._square, self._max_norm = optimizer, square, max_norm
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._states = [_copy(optimizer.state.get(p)) for p in self._parameters]
        optimizer.step()
        self._grads = [p.grad for p in self._parameters]
        self.drop()

    @property
    def square(self) -> float:
        """This process's share, once it is needed."""
        return float(self._square)

    def drop(self) -> None:
        """Take the gradients away."""
        for parameter in self._parameters:
            parameter.grad = None

    def settle(self, squares: Sequence[float]) -> bool:
        """Keep the step, take it again with smaller gradients, or undo it: whether it was finite."""
        if any(square < 0 for square in squares):
            raise PipelineError(
                "all ranks call optimizer_step, or none",
                got="some of them",
                fix="call it on every rank after each step",
            )
        norm = torch.tensor(sum(squares), dtype=torch.float64).sqrt().float()
        if not torch.isfinite(norm):
            self._roll_back()
            return False
        if self._max_norm is not None and norm > self._max_norm:
            self._roll_back()
            scale = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
            for parameter, grad in zip(self._parameters, self._grads, strict=True):
                parameter.grad = None if grad is None else grad * scale.to(grad.device)
            self._optimizer.step()
            self.drop()
        return True

    @torch.no_grad()
    def _roll_back(self) -> None:
        for parameter, value, state in zip(self._parameters, self._values, self._states, strict=True):
            parameter.copy_(value)
            if state is None:
                self._optimizer.state.pop(parameter, None)
                continue
            current = self._optimizer.state[parameter]
            for key in current.keys() - state.keys():
                del current[key]
            for key, old in state.items():
                if isinstance(old, Tensor) and isinstance(current.get(key), Tensor):
                    current[key].copy_(old)
                else:
                    current[key] = old


def _copy(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
