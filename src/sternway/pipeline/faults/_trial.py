"""An optimizer step that is taken before all ranks know whether it should be.

Whether gradients are finite, and their norm for clipping, is known only when the backward of every rank is done. To
wait for that would cost each rank the time of the others. In the zero-bubble paper [1] each rank steps at once, sends
its share of the norm with the exchange that opens the next step, and rolls back if the step turns out to be wrong. The
same is done here. But where the paper inverts the arithmetic, a copy is kept, so that rolling back is exact.

[1] Qi et al., Zero Bubble Pipeline Parallelism, section 4: https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.faults._nonfinite import OnNonfinite


class Trial:
    """An optimizer step that was taken, and how to undo it.

    Args:
        optimizer: takes the step; then its parameters' gradients are set to None.
        square: this process's share of the squared norm of the gradients.
        max_norm: clip the gradients to this norm, if given.
        on_nonfinite: what to do if gradients are not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, square: Tensor, max_norm: float | None, on_nonfinite: OnNonfinite
    ) -> None:
        self.on_nonfinite = on_nonfinite
        self._optimizer, self._square, self._max_norm = optimizer, square, max_norm
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._states = [_copy(optimizer.state.get(p)) for p in self._parameters]
        optimizer.step()
        self._grads = [p.grad for p in self._parameters]
        self._drop_grads()

    @property
    def square(self) -> float:
        """This process's share of the squared norm; waits for the device."""
        return float(self._square)

    def settle(self, squares: Sequence[float | None]) -> bool:
        """Given the shares of all ranks, keep the step, repeat it with clipped gradients, or undo it.

        Returns:
            Whether the gradients were finite.
        """
        check_all_or_none(squares)
        norm = torch.tensor(sum(square or 0.0 for square in squares), dtype=torch.float64).sqrt().float()
        if not torch.isfinite(norm):
            self._roll_back()
            return False
        if self._max_norm is not None and norm > self._max_norm:
            self._roll_back()
            scale = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
            for parameter, grad in zip(self._parameters, self._grads, strict=True):
                parameter.grad = None if grad is None else grad * scale.to(grad.device)
            self._optimizer.step()
            self._drop_grads()
        return True

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


def check_all_or_none(squares: Sequence[float | None]) -> None:
    """Raise if some ranks called ``optimizer_step`` and some did not."""
    missing = [rank for rank, square in enumerate(squares) if square is None]
    if missing and len(missing) < len(squares):
        raise PipelineError(
            "all ranks must call optimizer_step, or none",
            got=f"no call on rank {missing[0]}",
            fix="call it on every rank after each step",
        )


def _copy(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
