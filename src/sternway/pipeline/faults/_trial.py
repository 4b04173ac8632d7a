"""An optimizer step that is taken before all ranks know whether it should be.

Whether gradients are finite, and their norm for clipping, is known only when the backward of every rank is done. To
wait for that would cost each rank the time of the others. In the zero-bubble paper [1] each rank steps at once, and
rolls back if the step turns out to be wrong. The same is done here: the norm travels while the next step runs, and is
looked at when that is done. If it was wrong, the next step ran with wrong parameters, and is run again. Where the paper
inverts the arithmetic, a copy is kept, so that rolling back is exact.

[1] Qi et al., Zero Bubble Pipeline Parallelism, section 4: https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sternway.pipeline.faults._nonfinite import OnNonfinite
from sternway.pipeline.transport._facts import checksum
from sternway.pipeline.transport._later import Rows

Verdict = Literal["kept", "clipped", "nonfinite"]
"""What became of a step on trial."""


class Trial:
    """An optimizer step that was taken, and how to undo it.

    Args:
        optimizer: takes the step; then its parameters' gradients are set to None.
        squares: waits for every process's share of the squared norm of the gradients, as they were before clipping.
        max_norm: clip the gradients to this norm, if given.
        on_nonfinite: what to do if gradients are not finite.
        clipped: whether the gradients are clipped already, so that a large norm is no mistake.

    Attributes:
        exceeded: whether the norm was larger than ``max_norm``, once that is known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        squares: Callable[[], Rows],
        max_norm: float | None,
        on_nonfinite: OnNonfinite,
        clipped: bool,
    ) -> None:
        self.on_nonfinite, self.exceeded = on_nonfinite, False
        self.checksum = checksum(repr((max_norm, on_nonfinite)))
        self._optimizer, self._squares, self._max_norm, self._clipped = optimizer, squares, max_norm, clipped
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._states = [_copy(optimizer.state.get(p)) for p in self._parameters]
        optimizer.step()
        self._grads = [p.grad for p in self._parameters]
        self._drop_grads()

    def wait(self) -> None:
        """Wait for the norm over all ranks."""
        self._squares()

    def settle(self) -> Verdict:
        """Wait for the norm over all ranks; keep the step, repeat it with clipped gradients, or undo it."""
        norm = torch.tensor(sum(row[0] for row in self._squares()), dtype=torch.float64).sqrt().float()
        self.exceeded = self._max_norm is not None and bool(norm > self._max_norm)
        if not torch.isfinite(norm):
            self._roll_back()
            return "nonfinite"
        if self._max_norm is None or not self.exceeded or self._clipped:
            return "kept"
        self._roll_back()
        scale = float(torch.clamp(self._max_norm / (norm + 1e-6), max=1.0))
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = None if grad is None else grad * scale
        self._optimizer.step()
        self._drop_grads()
        return "clipped"

    def _drop_grads(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

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
