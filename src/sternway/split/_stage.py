"""torch.distributed.pipelining's three functions, with torch's names and signatures.

They accumulate as autograd does, in every bit. Unlike torch's own: hooks on parameters run, DDP reduces, outputs may be
views, stages may have custom Functions, compiled modules and checkpoints in them, and ``stage_backward_weight`` returns
the accumulated gradients.

Since torch 2.15 a stage frees an output that has been sent, and keeps a ``GradientEdge`` in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from sternway._torch.tensors import is_view
from sternway.errors import SplitError
from sternway.split._backward import backward_input
from sternway.split._places import describe, pair_leaves


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> tuple[Tensor | None, ...]:
    """Run the whole backward of a stage: accumulate the parameters' gradients, return those of the inputs."""
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[index] for index in outputs_with_grads_idxs]
        output_grads = [output_grads[index] for index in outputs_with_grads_idxs]
    pairs = _roots((output, grad) for _, output, grad in pair_leaves(stage_output, output_grads))
    torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    grads = []
    for value in input_values:
        grads.append(value.grad if isinstance(value, Tensor) else None)
        if isinstance(value, Tensor):
            value.grad = None  # it is sent to the stage before, and need not be kept here
    return tuple(grads)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor | GradientEdge | None],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[Parameter],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Run I of a stage: return the inputs' gradients, which are also added to their ``.grad``, and what W needs.

    ``weights`` is not used: the graph shows them. The outputs are detached, as torch does.
    """
    if output_grads is None:
        output_grads = [torch.ones_like(each) if isinstance(each, Tensor) else None for each in stage_outputs_or_loss]
    pairs = _roots(zip(stage_outputs_or_loss, output_grads, strict=True))
    if not pairs:
        return (None,) * len(input_values), []
    outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    dinputs, pending = backward_input(outputs, grads, list(input_values), exact=True)
    given = {id(value): (value, grad) for value, grad in zip(input_values, dinputs, strict=True)}  # each input once
    for value, grad in given.values():
        if isinstance(value, Tensor) and grad is not None:
            value.grad = grad if value.grad is None else value.grad + grad
    for output in outputs:
        if isinstance(output, Tensor) and not is_view(output):  # a view cannot be detached in place
            output.detach_()
    return tuple(dinputs), [{"pending": pending}]


def stage_backward_weight(
    weights: Iterator[Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run W of a stage: accumulate what ``stage_backward_input`` deferred, and return the weights' ``.grad``."""
    for group in param_groups:
        if "pending" not in group:
            raise SplitError(
                "stage_backward_weight must get what our stage_backward_input returned",
                got=f"a group with {sorted(group)}",
                fix="use both functions from the same library; split.install() replaces both",
            )
        group["pending"].run()
    return tuple(weight.grad for weight in weights)


def _roots(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Tensor | None]]:
    """Where a backward starts, with the gradients that arrive there; other outputs are passed over."""
    found = []
    for output, grad in pairs:
        if isinstance(output, GradientEdge) and not isinstance(grad, Tensor):
            raise SplitError(
                "an output that was freed must have a gradient from the next stage",
                got=f"{'none' if grad is None else describe(grad)} for {describe(output)}",
                fix="pass the gradient, or the output itself",
            )
        if isinstance(output, GradientEdge) or (isinstance(output, Tensor) and output.requires_grad):
            found.append((output, grad))
    return found
