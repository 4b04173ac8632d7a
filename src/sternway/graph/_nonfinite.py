"""``find_nonfinite``: the first node that makes NaN or ±inf from finite gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sternway.errors import GraphError
from sternway.graph._capture import capture
from sternway.graph._record import magnitude, nonfinite
from sternway.graph._tags import tag_of
from sternway.graph._walk import forward_order, is_leaf


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first operation that made NaN or ±inf from finite values."""

    phase: str  # "forward" or "backward"
    kind: str
    module: str
    source: str | None
    got: str  # the magnitudes that came in
    made: str  # what came out

    def __str__(self) -> str:
        where = f"{self.kind} in {self.module or 'no module'}" + (f" at {self.source}" if self.source else "")
        return f"{self.phase}: {where} got {self.got} and made {self.made}"


def find_nonfinite(loss: Tensor, model: nn.Module | None = None) -> Nonfinite | None:
    """Find the first node, in backward order, that makes NaN or ±inf from finite gradients; None if none does.

    Example:
        >>> x = torch.zeros(2, requires_grad=True)
        >>> print(find_nonfinite(x.sqrt().sum()))
        backward: SqrtBackward0 in no module got |x| in [1, 1] and made 0 NaN and 2 ±inf of 2 elements

    If the forward was recorded with ``graph.record(model, values=True)``, the forward is checked first: NaN in the
    forward is the usual cause of NaN in the backward. Then one backward runs, with the graph retained. It does not
    change ``.grad``; tensor hooks run as in any backward.

    Args:
        loss: a scalar.
        model: names the modules where the graph was not recorded.
    """
    GraphError.unless(isinstance(loss, Tensor), "loss must be a tensor", loss, "pass the loss")
    if loss.numel() != 1:
        raise GraphError("loss must be a scalar", got=f"a tensor of shape {tuple(loss.shape)}", fix="pass loss.sum()")
    snapshot = capture(loss, model)
    order = forward_order([loss.grad_fn] if loss.grad_fn is not None else [])
    for node in order:
        tag = tag_of(node)
        if tag is not None and tag.nonfinite:
            made, _, got = tag.nonfinite.partition("; inputs ")
            return Nonfinite("forward", tag.op, tag.module or "", tag.source, got, made)
    if wrong := nonfinite(loss):
        return Nonfinite("forward", "the loss", "", None, "(not recorded: use graph.record(model, values=True))", wrong)

    first: list[tuple[int, str, str]] = []

    def watch(index: int) -> Callable[..., None]:
        def look(made: tuple[Tensor | None, ...], got: tuple[Tensor | None, ...]) -> None:
            if not first and (wrong := [shown for grad in made if (shown := nonfinite(grad))]):
                # Its inputs were finite, or an earlier node would have been noted.
                first.append((index, ", ".join(magnitude(grad) for grad in got), wrong[0]))

        return look

    handles = [node.register_hook(watch(index)) for index, node in enumerate(order) if not is_leaf(node)]
    leaves = [node.variable for node in order if is_leaf(node)]
    try:
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if not first:
        return None
    index, got, made = first[0]
    node = snapshot.nodes[index]
    return Nonfinite("backward", node.kind, node.module, node.source, got, made)
