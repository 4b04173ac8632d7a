"""One stage: its module, and what it holds for each microbatch between F, I and W.

A stage knows nothing of ranks and transports. It is given what arrived, and returns what to send, by channel. The
channel ``"main"`` leads from each stage to the next; that of a skip leads from the stage that makes it to the one that
uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway import split
from sternway._torch.async_tensors import DROPPED, any_drops_gradient
from sternway._torch.failures import failure_of
from sternway.errors import PipelineError
from sternway.pipeline.forward._own_loss import loss_of, no_shares
from sternway.pipeline.forward._part import SHARES, ModelPart
from sternway.pipeline.step._again import RecomputedForward
from sternway.pipeline.step._captured import CapturedStage
from sternway.pipeline.step._dead import DeadOutputs, is_none, no_gradient
from sternway.pipeline.step._loss import LossFn, WeighedLoss, check_rows, not_half
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._movers import Movers
from sternway.pipeline.step._roots import Place, Root
from sternway.pipeline.step._sending import as_sent, tensors_anyway
from sternway.pipeline.step._shards import StageShards
from sternway.pipeline.step._slices import Slices, own_loss_of_a_slice
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._payload import Payload, as_inputs, pack, unpack
from sternway.pipeline.transport._routes import MAIN
from sternway.saved import Offload

__all__ = ["LossFn", "Stage", "WithSkips", "named_parameters"]


@dataclass(frozen=True, slots=True)
class WithSkips:
    """The return value of a stage that also sends tensors to stages after the next: its output, and those by name.

    The stage at the end of a skip gets it as a keyword argument of that name.
    """

    output: Any
    skips: dict[str, Any]


@dataclass(slots=True)
class _Graph:
    """What F of one microbatch keeps for its backward, by channel."""

    inputs: dict[str, list[Tensor]]
    roots: dict[str, list[Root]]


class Stage:
    """F, I, W and B of one stage, one microbatch at a time.

    Attributes:
        shards: what ``fully_shard`` made of the module; None if nothing.
        movers: what moves microbatches off the device; None if nothing does.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        is_last: bool,
        loss_fn: LossFn | None,
        saved: AbstractContextManager[Any] | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        cuda_graphs: bool = False,
        recompute: bool = False,
        offload: Callable[[], Offload] | None = None,
        slices: Slices | None = None,
        copies: Collective | None = None,
    ) -> None:
        self._scale, self._slices = scale, slices
        self.index, self.module, self.is_last, self.loss_fn = index, module, is_last, loss_fn
        self._saved = saved or nullcontext()
        self.movers = None if offload is None else Movers(offload)
        self.shards = StageShards.of(module, is_first=index == 0, is_last=is_last)
        by_fsdp = frozenset() if self.shards is None else self.shards.names
        self._has_collectives = slices is not None or any(
            isinstance(p, DTensor) and (name not in by_fsdp or p.device_mesh.ndim > 1)
            for name, p in module.named_parameters()
        )
        if isinstance(module, ModelPart):
            module.sternway_uses_own_loss = is_last and loss_fn is None
        self.captured = CapturedStage(index, module) if cuda_graphs else None
        self._call: Callable[..., Any] = self.captured or module
        if recompute:
            self._call = RecomputedForward(module, self._call)
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._graphs: dict[int, _Graph] = {}
        self._pendings: dict[int, split.Pending] = {}
        self._device = "cpu"  # where the last I ran
        self._weighed, self._dead = WeighedLoss(slices, copies), DeadOutputs()

    def forward(
        self,
        number: int,
        microbatch: Microbatch,
        received: dict[str, Payload],
        keep_output: bool,
        offload: bool = False,
    ) -> dict[str, Payload]:
        """F: call the module with what arrived, or with the microbatch; returns what to send, by channel.

        With ``offload``, what it keeps leaves the device; one of the ``movers`` has it.
        """
        with self._saved, self._moving(number, microbatch, received) if offload else nullcontext():
            return self._forward(number, microbatch, received, keep_output)

    def _moving(self, number: int, microbatch: Microbatch, received: dict[str, Payload]) -> Offload:
        """What moves the activations of a microbatch, but not what the rank holds anyway."""
        assert self.movers is not None, "a pipeline with such a schedule has them"
        mover = self.movers.take(number)
        mover.spare([*tensors_anyway(microbatch, received), *self.held_by_name()])
        return mover

    def _forward(
        self, number: int, microbatch: Microbatch, received: dict[str, Payload], keep_output: bool
    ) -> dict[str, Payload]:
        if self.shards is not None:
            self.shards.wait(all_units=False)
        training = torch.is_grad_enabled()
        if training:
            split.forward_begins()
        inputs = {name: as_inputs(*payload) if training else payload[1] for name, payload in received.items()}
        trees = {name: unpack(spec, inputs[name], self.module.parameters) for name, (spec, _) in received.items()}
        keywords = dict(microbatch.stage_kwargs or {})
        if MAIN in trees:
            main = trees.pop(MAIN)
            arguments = main if type(main) is tuple else (main,)
        else:
            arguments = microbatch.arguments
            keywords |= microbatch.keywords or {}
            if microbatch.shares is not None:
                keywords[SHARES] = microbatch.shares
        try:
            result = self._call(*arguments, **keywords, **trees)
        except RuntimeError as error:
            if inputs and failure_of(error) == "leaf":
                raise _changed_in_place(self.index) from error
            raise
        output, skips = (result.output, result.skips) if isinstance(result, WithSkips) else (result, {})

        sent = skips if self.is_last else {MAIN: output} | skips
        payloads = {name: pack(tree, shards=True) for name, tree in sent.items()}
        roots = self._sent_roots(payloads) if training else {}
        if self.is_last:
            loss = self._loss(output, microbatch)
            if keep_output or loss is None:
                self.outputs[number] = output
            if loss is not None:
                self.losses[number] = self._weighed.reported(loss.detach())
                if loss.requires_grad:
                    roots[MAIN] = [Root(loss if self._scale is None else self._scale(loss))]
        if training:
            needing = {name: [t for t in tensors if t.requires_grad] for name, tensors in inputs.items()}
            self._graphs[number] = _Graph(needing, roots)
        given = [*tensors_anyway(microbatch, {}), *(tensor for tensors in inputs.values() for tensor in tensors)]
        return as_sent(payloads, given, self.module)

    def _sent_roots(self, payloads: dict[str, Payload]) -> dict[str, list[Root]]:
        """Where gradients will come back for what is sent, by channel."""
        dead: set[int] = set()
        if isinstance(self.module, ModelPart) and not self.is_last:
            dead = {id(tensor) for tensor in self.module.sternway_dead}
            self.module.sternway_dead = []  # it would keep them
        return {
            name: [Root.of(tensor, id(tensor) in dead) for tensor in tensors if tensor.requires_grad]
            for name, (_, tensors) in payloads.items()
        }

    def _loss(self, output: Any, microbatch: Microbatch) -> Tensor | None:
        """This microbatch's part of the loss, by ``loss_fn`` or by the model itself; None if there is none."""
        if isinstance(self.module, ModelPart) and self.module.sternway_uses_own_loss:
            weight = self.module.sternway_weight if microbatch.weight < 1 else 1.0
            if weight is None and torch.is_grad_enabled():
                raise no_shares()
            if weight is None:
                return None
            if self._slices is not None:
                raise own_loss_of_a_slice()
            loss = not_half(loss_of(output))
            return (loss * weight).to(loss.dtype)
        if self.loss_fn is None or microbatch.target is None:
            return None
        check_rows(output, microbatch)
        return self._weighed(self.loss_fn, output, microbatch)

    def own_losses(self) -> list[Tensor]:
        """Of each output, the loss that the model itself returned in it."""
        if self.losses and isinstance(self.module, ModelPart) and self.module.sternway_uses_own_loss:
            return [loss_of(output) for output in self.outputs.values()]
        return []

    def all_modules(self) -> list[nn.Module]:
        """The modules of the stage; of a whole model, all, since its code between the pieces runs in every stage."""
        whole = self.module.model.modules() if isinstance(self.module, ModelPart) else ()
        return [*self.module.modules(), *whole]

    def held_by_name(self) -> list[Tensor]:
        """Buffers, and tensors that are plain attributes of modules, such as tables: no microbatch's own."""
        modules = self.all_modules()
        plain = [value for module in modules for value in vars(module).values() if isinstance(value, Tensor)]
        return [*plain, *(buffer for module in modules for buffer in module.buffers(recurse=False))]

    def check_step(self) -> None:
        """At the end of a step: raise if its losses do not add up to that of the batch, or a gradient was left out.

        On a GPU it waits until F of all microbatches is done, if the loss is a sum and a count, while the rest of the
        step is waiting to run; if there are outputs that no gradient is expected for, until their backward has begun.
        """
        self._weighed.check()
        self._dead.check()

    def backward_input(self, number: int, grads: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """I: returns the gradients of what was received, by channel. What W needs is kept."""
        self._wait()
        graph = self._graphs.pop(number)
        roots, root_grads = self._starts(graph, grads)
        found: dict[str, list[Tensor | None]] = {name: [None] * len(ts) for name, ts in graph.inputs.items()}
        if roots:
            self._device = roots[0].device
            with torch.autocast(self._device, enabled=False):
                found, self._pendings[number] = split.backward_input(
                    [root.place for root in roots], root_grads, graph.inputs, own_thread=True
                )
        return self._whole(found, graph.inputs)

    def backward_weight(self, number: int) -> None:
        """W: the weight gradients that I left."""
        self._wait()
        if (pending := self._pendings.pop(number, None)) is not None:
            with torch.autocast(self._device, enabled=False):
                pending.run()
        self._done(number)

    def backward(self, number: int, grads: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """B: I and W in one call of the autograd engine, which costs less than two; of graphs, both are replayed."""
        if self.captured is not None:
            found = self.backward_input(number, grads)
            self.backward_weight(number)
            return found
        self._wait()
        graph = self._graphs.pop(number)
        roots, root_grads = self._starts(graph, grads)
        if roots:
            places: list[Any] = [root.place for root in roots]  # torch takes tensors beside edges
            if self._has_collectives:
                _check_compiled(places)
            with torch.autocast(roots[0].device, enabled=False):
                torch.autograd.backward(places, root_grads)
        self._done(number)
        return self._whole({name: [t.grad for t in tensors] for name, tensors in graph.inputs.items()}, graph.inputs)

    def _starts(self, graph: _Graph, grads: dict[str, list[Tensor]]) -> tuple[list[Root], list[Tensor | None]]:
        """Where this backward starts, with the gradients there: at what was sent, and at the loss."""
        pairs: list[tuple[Root, Tensor | None]] = []
        for name, roots in graph.roots.items():
            is_loss = self.is_last and name == MAIN
            pairs += [(root, None) for root in roots] if is_loss else zip(roots, grads[name], strict=True)
        if not isinstance(self.module, ModelPart):
            pairs = [(root, grad) for root, grad in pairs if not is_none(grad)]
        pairs = [
            (root, grad)
            for place, (root, grad) in enumerate(pairs)
            if not root.is_dead or grad is None or self._dead.got_some(place, grad)
        ]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _whole(self, found: dict[str, list[Tensor | None]], like: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """``found``, with a stand-in for gradients that autograd did not make: the other side waits for each."""
        none = torch.zeros_like if isinstance(self.module, ModelPart) else no_gradient
        return {
            name: [none(t) if grad is None else grad for grad, t in zip(found[name], tensors, strict=True)]
            for name, tensors in like.items()
        }

    def _wait(self) -> None:
        if self.shards is not None:
            self.shards.wait()

    def _done(self, number: int) -> None:
        """The gradients of a microbatch are complete."""
        if self.shards is not None:
            self.shards.keep_grads()
        if self.movers is not None:
            self.movers.give(number)

    def pending_bytes(self, number: int) -> int:
        """The bytes that wait for W of a microbatch."""
        return self._pendings[number].nbytes if number in self._pendings else 0

    def clear(self) -> None:
        """Drop everything, after a step or an error."""
        for held in (self.losses, self.outputs, self._graphs, self._pendings):
            held.clear()
        self._weighed.clear()
        self._dead.clear()
        if self.shards is not None:
            self.shards.drop()
        if self.movers is not None:
            self.movers.give_all()

    def close(self) -> None:
        """No step follows."""
        if self.movers is not None:
            self.movers.close()


def _changed_in_place(stage: int) -> PipelineError:
    return PipelineError(
        f"stage {stage} changes in place what it received, whose gradient goes back to the stage before",
        got="an in-place operation on an input, such as x += 1 or nn.ReLU(inplace=True)",
        fix="change a copy: x = x.clone(); or pass the whole model, of which the stages copy what they change",
    )


def _check_compiled(places: list[Place]) -> None:
    """Raise if a gradient would be lost; where the backward is split, the split looks for that itself."""
    if any_drops_gradient(places):
        raise PipelineError(**DROPPED)


def named_parameters(stages: Mapping[int, Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some stages, each once, by name."""
    seen: set[int] = set()
    for stage in stages.values():
        for name, parameter in stage.module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter
