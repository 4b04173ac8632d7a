"""One row of the zoo's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Callable[[int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture that nobody here wrote.

    Attributes:
        name: of the row.
        family: what kind of model it is.
        build: makes the model, unmodified, in training mode, with random weights.
        batch: so many rows of keyword arguments of its forward.
        target: for a model that returns no loss of its own, the target of ``loss_fn`` for so many rows.
        coupled: the loss of a row depends on the other rows (a contrastive loss), so that a batch in microbatches has
            another loss than the whole batch, whoever computes it. Batch norm does that, too.
        refused: what the error says if the model's own loss is to be computed in microbatches, and cannot be.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Batch
    target: Callable[[int], Tensor] | None = None
    coupled: bool = False
    refused: str | None = None

    def make(self) -> nn.Module:
        """The model, the same one each time, in training mode."""
        torch.manual_seed(0)
        model = self.build().train()
        for module in model.modules():  # what random draws remain: other draws for other microbatches are not an error
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
        return model

    def data(self, rows: int) -> tuple[dict[str, Any], Tensor | None]:
        """A batch, the same one each time, and its target."""
        torch.manual_seed(1)
        return self.batch(rows), None if self.target is None else self.target(rows)

    def __str__(self) -> str:
        return self.name


def tensor_of(output: Any) -> Tensor:
    """The tensor that a model's output is about."""
    if isinstance(output, Tensor):
        return output
    return output.sample if hasattr(output, "sample") else output[0]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """The loss for models that have none: the mean square error, or cross entropy for classes."""
    value = tensor_of(output)
    if target.dtype == torch.long:
        return nn.functional.cross_entropy(value, target)
    return nn.functional.mse_loss(value, target)


def given_loss(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """The loss that the model returned, as a ``loss_fn``: the mean over microbatches is the user's decision then."""
    return output.loss * len(target), len(target)


def loss_of(model: nn.Module, batch: dict[str, Any], target: Tensor | None) -> Tensor:
    """The loss of a batch: the model's own, or ``loss_fn``'s."""
    output = model(**batch)
    return output.loss if target is None else loss_fn(output, target)


def plain_step(entry: Entry, model: nn.Module, rows: int, n_microbatches: int) -> Tensor:
    """Forward and backward without any of our code; the loss. For a coupled model, in as many microbatches."""
    batch, target = entry.data(rows)
    coupled = entry.coupled or any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    parts = n_microbatches if coupled else 1
    total = torch.zeros(())
    for part in range(parts):
        chosen = slice(part * rows // parts, (part + 1) * rows // parts)
        some = {name: value[chosen] if isinstance(value, Tensor) else value for name, value in batch.items()}
        loss = loss_of(model, some, None if target is None else target[chosen]) / parts
        loss.backward()
        total += loss.detach()
    return total
