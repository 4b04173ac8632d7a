"""A loss that is tried on the sample, and is afterwards as it was before.

A loss may have parameters and buffers, which are no stage's: a learned temperature, a mean that it follows. It may be a
module, or a function that calls one, so that its parameters are found in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.step._loss import LossFn


@contextmanager
def sample_loss(loss_fn: LossFn | None, modules: Sequence[nn.Module]) -> Iterator[LossFn | None]:
    """A block with a loss that computes the same. Afterwards gradients and buffers of ``loss_fn`` are as before.

    Args:
        loss_fn: the loss.
        modules: the stages, whose gradients are somebody else's concern.
    """
    if loss_fn is None:
        yield None
        return
    theirs = {id(parameter) for module in modules for parameter in module.parameters()}
    aside: dict[int, tuple[Tensor, Tensor | None]] = {}

    def tried(output: Any, target: Any) -> Any:
        loss = loss_fn(output, target)
        total = loss[0] if isinstance(loss, tuple) and loss else loss
        for leaf in _leaves_of(total) if isinstance(total, Tensor) else ():
            if id(leaf) not in theirs and id(leaf) not in aside:
                aside[id(leaf)] = leaf, leaf.grad
                leaf.grad = None
        return loss

    with ExitStack() as stack:
        if isinstance(loss_fn, nn.Module):
            stack.enter_context(untouched(loss_fn))
        try:
            yield tried
        finally:
            for leaf, grad in aside.values():
                leaf.grad = grad


def _leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward from ``tensor`` would give gradients."""
    open_nodes, seen = [tensor.grad_fn], set[Any]()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        open_nodes += [each for each, _ in node.next_functions]
