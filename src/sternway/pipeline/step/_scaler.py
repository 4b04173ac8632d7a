"""Loss scaling over ranks: gradients that are infinite on one rank make all ranks skip the step and lower the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sternway._torch.amp import ShardScaler, found_infinities
from sternway.errors import PipelineError


class GradScaler(ShardScaler):
    """``torch.amp.GradScaler`` for a pipeline. Pass it to ``Pipeline(scaler=…)``, which scales the loss with it.

    Example:
        >>> scaler = GradScaler("cuda")                                               # doctest: +SKIP
        >>> pipe = Pipeline(model, loss_fn=loss_fn, scaler=scaler, …)                 # doctest: +SKIP
        >>> pipe.step(batch, target=target)                                           # doctest: +SKIP
        >>> scaler.step(optimizer)           # on every rank, or on none              # doctest: +SKIP
        >>> scaler.update()                  # the same scale on every rank           # doctest: +SKIP

    ``result.loss`` is not scaled. Call ``scaler.unscale_(optimizer)`` before ``pipe.clip_grad_norm_``, as in torch. The
    arguments are torch's, and must be the same on every rank.
    """

    _add_up: Callable[[Tensor], None] | None = None
    _where = torch.device("cpu")

    def connect(self, add_up: Callable[[Tensor], None], device: torch.device) -> None:
        """Belong to a pipeline, which adds numbers up over its ranks; ``Pipeline`` calls this."""
        self._add_up, self._where = add_up, device
        self._unscaled: set[int] = set()
        self.scale(torch.zeros((), device=device))  # torch makes the scale when it is first used

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and look whether those of all ranks are finite."""
        if self._add_up is None:
            raise PipelineError("a GradScaler must belong to a pipeline", got="none", fix="pass Pipeline(scaler=…)")
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        self._unscaled.add(id(optimizer))
        found = found_infinities(self, optimizer)
        mine: Tensor = sum(found, torch.zeros((), device=self._where))
        self._add_up(mine)
        for each in found:
            each.copy_(mine)

    def check_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the gradients are those of the scaled loss."""
        if self.is_enabled() and id(optimizer) not in getattr(self, "_unscaled", ()):
            raise PipelineError(
                "optimizer_step would step with the gradients of the scaled loss",
                got="a pipeline with scaler=",
                fix="call scaler.step(optimizer) and scaler.update() instead",
            )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer step, unless the gradients of any rank are not finite."""
        if self.is_enabled() and id(optimizer) not in getattr(self, "_unscaled", ()):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale, in the same way on every rank."""
        if self._add_up is not None:
            self._unscaled.clear()
        super().update(new_scale)
