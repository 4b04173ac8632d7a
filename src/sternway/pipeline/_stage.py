"""One stage at work: its module, and what it holds for each microbatch between F, I and W.

A stage knows nothing of ranks and transport. It is handed what arrived and hands out what is to be sent, by channel:
``"main"`` leads from one stage to the next, a skip's name from the stage that makes it to the one that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway import split
from sternway.errors import PipelineError
from sternway.pipeline._payload import Spec, as_inputs, pack, unpack

MAIN = "main"
Payload = tuple[Spec, list[Tensor]]
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class WithSkips:
    """What a stage returns that sends tensors past its neighbour: its output, and the others by name.

    The stage that a skip leads to gets it as a keyword argument of that name.
    """

    output: Any
    skips: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one microbatch brings along: for the first stage, for every stage, and for the loss."""

    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None  # for the first stage
    stage_kwargs: dict[str, Any] | None = None  # for every stage
    target: Any = None
    weight: float = 1.0  # its share of the batch


@dataclass(slots=True)
class _Graph:
    """What F of one microbatch leaves for its backward, by channel."""

    inputs: dict[str, list[Tensor]]
    outputs: dict[str, list[Tensor]]


class Stage:
    """F, I, W and B of one stage, one microbatch at a time."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        is_last: bool,
        loss_fn: LossFn | None,
        saved: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.index, self.module, self.is_last, self.loss_fn = index, module, is_last, loss_fn
        self._saved = saved or nullcontext()
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._graphs: dict[int, _Graph] = {}
        self._pendings: dict[int, split.Pending] = {}

    def forward(
        self, number: int, microbatch: Microbatch, received: dict[str, Payload], keep_output: bool
    ) -> dict[str, Payload]:
        """F: call the module with what arrived, or with the microbatch; what to send, by channel."""
        with self._saved:
            return self._forward(number, microbatch, received, keep_output)

    def _forward(
        self, number: int, microbatch: Microbatch, received: dict[str, Payload], keep_output: bool
    ) -> dict[str, Payload]:
        training = torch.is_grad_enabled()
        inputs = {name: as_inputs(*payload) if training else payload[1] for name, payload in received.items()}
        trees = {name: unpack(payload[0], inputs[name]) for name, payload in received.items()}
        keywords = dict(microbatch.stage_kwargs or {})
        if MAIN in trees:
            main = trees.pop(MAIN)
            arguments = main if type(main) is tuple else (main,)
        else:
            arguments = microbatch.arguments
            keywords |= microbatch.keywords or {}
        result = self.module(*arguments, **keywords, **trees)
        output, skips = (result.output, result.skips) if isinstance(result, WithSkips) else (result, {})

        sent = skips if self.is_last else {MAIN: output} | skips
        payloads = {name: pack(tree) for name, tree in sent.items()}
        graph_outputs = {name: [t for t in tensors if t.requires_grad] for name, (_, tensors) in payloads.items()}
        if self.is_last:
            if keep_output or self.loss_fn is None:
                self.outputs[number] = output
            if self.loss_fn is not None and microbatch.target is not None:
                loss = self._loss(output, microbatch)
                self.losses[number] = loss.detach()
                graph_outputs[MAIN] = [loss] if loss.requires_grad else []
        if training:
            needing = {name: [t for t in tensors if t.requires_grad] for name, tensors in inputs.items()}
            self._graphs[number] = _Graph(needing, graph_outputs)
        return {name: (spec, [t.detach() for t in tensors]) for name, (spec, tensors) in payloads.items()}

    def _loss(self, output: Any, microbatch: Microbatch) -> Tensor:
        assert self.loss_fn is not None
        loss = self.loss_fn(output, microbatch.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PipelineError("the loss is one number", got=got, fix="reduce it, as by .mean()")
        return loss * microbatch.weight

    def backward_input(self, number: int, grads: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """I: the gradients of what was received, by channel; W waits."""
        graph = self._graphs.pop(number)
        outputs, output_grads = self._roots(graph, grads)
        found: dict[str, list[Tensor | None]] = {name: [None] * len(ts) for name, ts in graph.inputs.items()}
        if outputs:
            with torch.autocast(outputs[0].device.type, enabled=False):
                found, self._pendings[number] = split.backward_input(outputs, output_grads, graph.inputs)
        return _whole(found, graph.inputs)

    def backward_weight(self, number: int) -> None:
        """W: what I left."""
        if (pending := self._pendings.pop(number, None)) is not None:
            pending.run()

    def backward(self, number: int, grads: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """B: I and W as one, which costs autograd less than the two."""
        graph = self._graphs.pop(number)
        outputs, output_grads = self._roots(graph, grads)
        if outputs:
            with torch.autocast(outputs[0].device.type, enabled=False):
                torch.autograd.backward(outputs, output_grads)
        return _whole({name: [t.grad for t in tensors] for name, tensors in graph.inputs.items()}, graph.inputs)

    def _roots(self, graph: _Graph, grads: dict[str, list[Tensor]]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where this backward starts: the outputs that gradients came back for, and the loss."""
        outputs: list[Tensor] = []
        output_grads: list[Tensor | None] = []
        for name, tensors in graph.outputs.items():
            outputs += tensors
            output_grads += [None] * len(tensors) if self.is_last and name == MAIN else grads[name]
        return outputs, output_grads

    def clear(self) -> None:
        """Let go of everything, after a step or an error."""
        for held in (self.losses, self.outputs, self._graphs, self._pendings):
            held.clear()


def _whole(found: dict[str, list[Tensor | None]], like: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Zeros where no gradient came: the other side waits for each."""
    return {
        name: [torch.zeros_like(t) if grad is None else grad for grad, t in zip(found[name], tensors, strict=True)]
        for name, tensors in like.items()
    }
