"""A model as a middle stage sees it: its activations come from outside, and their gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zoo.entry import Entry, loss_of


def step_with_inputs(entry: Entry, model: nn.Module, rows: int = 4) -> Callable[[], tuple[Tensor, Sequence[Tensor]]]:
    """A function that runs the forward, and gives the loss and the inputs, for ``zoo.deferred.measure``.

    Inputs are the tensors of the batch that are not whole numbers, and what token embeddings
    and feature extractors return.
    """
    batch, target = entry.data(rows)
    got: list[Tensor] = []

    def as_input(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        got.append(output.detach().requires_grad_())
        return got[-1]

    for name, module in model.named_modules():
        tokens = isinstance(module, nn.Embedding) and module.num_embeddings == 64  # the zoo's vocabulary
        if tokens or name.endswith("feature_extractor"):
            module.register_forward_hook(as_input)
    own = {
        name: value.requires_grad_()
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "input_values"  # set by the model itself
    }

    def step() -> tuple[Tensor, Sequence[Tensor]]:
        got.clear()
        loss = loss_of(model, batch, target)
        return loss, [*own.values(), *got]

    return step
