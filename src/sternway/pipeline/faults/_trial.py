"""An optimizer step that is taken before all ranks know whether it should be.

Whether gradients are finite, and their norm for clipping, is known only when the backward of every rank is done. To
wait for that would cost each rank the time of the others. In the zero-bubble paper [1] each rank steps at once, and
rolls back if the step turns out to be wrong. The same is done here: the norm travels while the next step runs, and is
looked at when that is done. If it was wrong, the next step ran with wrong parameters, and is run again. Where the paper
inverts the arithmetic, a copy is kept, so that rolling back is exact. A step that is repeated has the learning rate
that it had; what a scheduler has set since is for the next one. It has the gradients that it had, too: some optimizers
write to them, as torch's SGD with nesterov does where it takes many parameters at once.

[1] Qi et al., Zero Bubble Pipeline Parallelism, section 4: https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sternway._torch.tensors import version_of
from sternway.errors import PipelineError
from sternway.pipeline.faults._nonfinite import OnNonfinite
from sternway.pipeline.step._grads import norm_of
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
        writes: whether the optimizer is known to write to gradients, or not; None if that is not known.

    Attributes:
        writes: whether it did.
        exceeded: whether the norm was larger than ``max_norm``, once that is known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        squares: Callable[[], Rows],
        max_norm: float | None,
        on_nonfinite: OnNonfinite,
        clipped: bool,
        writes: bool | None = None,
    ) -> None:
        self.on_nonfinite, self.exceeded = on_nonfinite, False
        self.checksum = checksum(repr((max_norm, on_nonfinite)))
        self._optimizer, self._squares, self._max_norm, self._clipped = optimizer, squares, max_norm, clipped
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._states = [_copy(optimizer.state.get(p)) for p in self._parameters]
        self._options = _options(optimizer)
        repeats, grads = max_norm is not None and not clipped, [p.grad for p in self._parameters]
        before = [None if grad is None else version_of(grad) for grad in grads]
        copies = (
            [None if grad is None else grad.clone() for grad in grads] if repeats and writes is not False else grads
        )
        optimizer.step()
        self._options_after = _options(optimizer)
        after = [None if grad is None else version_of(grad) for grad in grads]
        self.writes = before != after if any(grad is not None for grad in grads) else writes
        if self.writes and writes is False and repeats:
            raise PipelineError(
                "an optimizer must write to gradients in every step, or in none",
                got=f"{type(optimizer).__name__}, which did not before",
                fix="call pipe.clip_grad_norm_, optimizer.step and optimizer.zero_grad instead of pipe.optimizer_step",
            )
        self._grads = copies if self.writes else grads
        self._drop_grads()

    def wait(self) -> None:
        """Wait for the norm over all ranks."""
        self._squares()

    def settle(self) -> Verdict:
        """Wait for the norm over all ranks; keep the step, repeat it with clipped gradients, or undo it."""
        square = torch.tensor(sum(row[0] for row in self._squares()), dtype=torch.float64)
        norm = norm_of(square, ())  # all ranks decide by the same, whatever their gradients are
        self.exceeded = self._max_norm is not None and bool(norm > self._max_norm)
        if not torch.isfinite(norm):
            self._set_options(self._roll_back())
            return "nonfinite"
        if self._max_norm is None or not self.exceeded or self._clipped:
            return "kept"
        later = self._roll_back()
        scale = float(torch.clamp(self._max_norm / (norm_of(square, self._grads) + 1e-6), max=1.0))
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = None if grad is None else grad * scale
        self._optimizer.step()
        self._set_options(later)
        self._drop_grads()
        return "clipped"

    def _changed_since(self) -> list[dict[str, Any]]:
        """Options of groups that were set after the step, as by a learning rate scheduler."""
        pairs = zip(_options(self._optimizer), self._options_after, strict=False)
        return [
            {key: value for key, value in now.items() if key not in then or not _same(value, then[key])}
            for now, then in pairs
        ]

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        for group, own in zip(self._optimizer.param_groups, options, strict=False):
            for key, value in own.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _drop_grads(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _roll_back(self) -> list[dict[str, Any]]:
        """Undo the step. Returns what was set in the groups since, which is for the next."""
        later = self._changed_since()
        for group, before in zip(self._optimizer.param_groups, self._options, strict=False):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
        self._set_options(self._options)
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
        return later


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups have besides parameters, such as the learning rate."""
    groups = optimizer.param_groups
    return [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _copy(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state.items()}
