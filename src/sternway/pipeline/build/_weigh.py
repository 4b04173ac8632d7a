"""How many bytes and operations do F, I, W and B of each stage take? Counted on tensors without memory.

Stages are run one by one. What a stage receives is a copy, as it is between ranks. Stages that look alike, with the
same parameters' shapes and the same messages, are counted once: of a model of eighty equal blocks, a few stages are.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sternway import saved
from sternway._storage import storage_bytes, storage_sizes
from sternway._torch.memory import OperationCounter
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._sending import tensors_anyway
from sternway.pipeline.step._stage import LossFn, Stage
from sternway.pipeline.transport._payload import Payload, Spec

Watched = weakref.ref[torch.UntypedStorage]
Op = Literal["F", "I", "W", "B"]
SHOWN = 3  # of the largest tensors
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ActionWeight:
    """What an action takes.

    Attributes:
        peak: the most bytes while it runs, beyond those that were there before.
        left: the bytes that it leaves beyond those; fewer than none if it frees some.
        flops: its floating-point operations, those that are done again included.
    """

    peak: int
    left: int
    flops: int


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A tensor that takes much, or several that look alike.

    Attributes:
        what: the name of a parameter, or "activation".
        shape: its shape.
        dtype: its dtype, as text.
        nbytes: the bytes of each.
        count: how many there are.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    count: int = 1

    @classmethod
    def of(cls, what: str, tensor: Tensor) -> LargeTensor:
        """That of a tensor."""
        return cls(what, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


@dataclass(frozen=True, slots=True)
class StageWeight:
    """What a stage takes for one microbatch.

    Attributes:
        parameters: the bytes of its parameters and buffers.
        gradients: those of the gradients of its parameters.
        message: the bytes of what it receives in F.
        actions: what F, I, W and B take.
        buffers: of the bytes of ``parameters``, those of buffers, which are never sharded.
        largest: the bytes of the parameters of its largest module.
        sent: of what F sends, the bytes that the stage does not keep itself: they go with the message.
        moved: of what F leaves, the bytes that leave the device if the microbatch is offloaded, and then come back.
            What the stage has received stays.
        freed: of these, the bytes that go at once; the others are sent, and go with the message.
        input_waits: whether W needs what F received.
        gradient_waits: whether W needs what I received.
        kept: the largest tensors that F keeps, parameters and messages apart.
    """

    parameters: int
    gradients: int
    message: int
    actions: dict[Op, ActionWeight]
    buffers: int = 0
    largest: int = 0
    sent: int = 0
    moved: int = 0
    freed: int = 0
    input_waits: bool = False
    gradient_waits: bool = False
    kept: tuple[LargeTensor, ...] = ()


def weigh(
    parts: Sequence[nn.Module],
    microbatch: Microbatch,
    loss_fn: LossFn | None,
    messages: list[dict[str, Spec]] | None = None,
) -> list[StageWeight]:
    """What each stage takes. Its tensors must be without memory.

    Args:
        parts: the stages.
        microbatch: what the first of them is called with.
        loss_fn: of the last one.
        messages: what each stage sends, if it is known; else it is found, and added. Whatever is recomputed, it is the
            same.
    """
    messages = [] if messages is None else messages
    known: dict[Any, StageWeight] = {}
    passed: dict[Any, dict[str, Spec]] = {}  # what stages send that look alike and receive the same
    received: dict[str, Spec] = {}
    found = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        scale = _Scale(Stage(index, part, is_last=is_last, loss_fn=loss_fn if is_last else None), microbatch, received)
        looks = _looks(part, received, is_last)
        if looks not in known:
            known[looks] = scale.weigh()
        found.append(known[looks])
        if index == len(messages):
            same = looks, repr(received)
            if same not in passed:
                passed[same] = scale.sent()
            messages.append(passed[same])
        received = messages[index]
    return found


def _looks(part: nn.Module, received: dict[str, Spec], is_last: bool) -> Any:
    """What decides how much a stage takes: modules, which are recomputed, parameters' shapes, and what it receives."""
    again = (vars(module).get("forward") for module in part.modules())
    modules = tuple(
        (type(module).__qualname__, forward is not None, getattr(forward, "selective", False))
        for module, forward in zip(part.modules(), again, strict=True)
    )
    tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*part.parameters(), *part.buffers()))
    return modules, tensors, tuple((name, spec.tensors) for name, spec in received.items()), is_last


class _Scale:
    """Weighs one stage."""

    def __init__(self, stage: Stage, microbatch: Microbatch, received: dict[str, Spec]) -> None:
        self._stage, self._microbatch, self._received = stage, microbatch, received
        self._counter = OperationCounter()
        self._sent: dict[str, Spec] = {}
        self._beyond = 0  # of what it sends in F, the bytes that it does not keep
        self._inputs: list[Watched] = []  # what it has received in F, and in its backward
        self._grads: list[Watched] = []

    def sent(self) -> dict[str, Spec]:
        """What the stage sends in F."""
        if not self._sent:
            self._forward()
            self._stage.clear()
        return self._sent

    def weigh(self) -> StageWeight:
        """What the stage takes."""
        module, actions = self._stage.module, dict[Op, ActionWeight]()
        parameters = list(module.parameters())
        self._counter.leave_out([*parameters, *module.buffers(), *tensors_anyway(self._microbatch, {})])
        with self._counter:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            self._forward()  # now the stage knows its inputs, and the counter what was there before
            self._stage.clear()
            actions["F"] = self._action(self._forward)
            sent = self._beyond
            actions["I"] = self._action(self._input)
            waits = _live(self._inputs), _live(self._grads)
            actions["W"] = self._action(self._weight)
            moved, freed, kept = self._moves()
            actions["B"] = self._action(self._whole)
        gradients = storage_bytes(p for p in parameters if p.requires_grad)
        for parameter in parameters:
            parameter.grad = None
        self._stage.clear()
        message = sum(each.nbytes for spec in self._received.values() for each in _empty(spec))
        held = storage_bytes([*parameters, *module.buffers()])
        buffers = held - storage_bytes(parameters)
        largest = max((storage_bytes(each.parameters()) for each in _called(module)), default=0)
        return StageWeight(held, gradients, message, actions, buffers, largest, sent, moved, freed, *waits, kept)

    def _moves(self) -> tuple[int, int, tuple[LargeTensor, ...]]:
        """The bytes that leave the device with a microbatch, those that go at once, and the largest tensors of them."""
        sizes: dict[int, int] = {}
        looks: dict[int, LargeTensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            for key, size in storage_sizes([tensor]).items():
                sizes[key] = size
                looks[key] = replace(LargeTensor.of("activation", tensor), nbytes=size)
            return tensor.detach()

        received = self._arriving()
        with saved.keep(), saved.Hooks(pack, lambda tensor: tensor):  # which see what selective blocks keep, too
            sent = self._stage.forward(0, self._microbatch, received, keep_output=False)
        module = self._stage.module
        anyway = [*tensors_anyway(self._microbatch, received), *self._stage.held_by_name()]
        own = storage_sizes((*module.parameters(), *anyway))
        moved = {key: size for key, size in sizes.items() if key not in own}
        stays = storage_sizes(tensor for _, tensors in sent.values() for tensor in tensors)
        kept = largest_of(looks[key] for key in moved)
        return sum(moved.values()), sum(size for key, size in moved.items() if key not in stays), kept

    def _action(self, run: Callable[[], None]) -> ActionWeight:
        counter = self._counter
        before = counter.peak = counter.now
        counter.flops = 0
        run()
        return ActionWeight(counter.peak - before, counter.now - before, counter.flops)

    def _arriving(self) -> dict[str, Payload]:
        return {name: (spec, _empty(spec)) for name, spec in self._received.items()}

    def _forward(self) -> None:
        received = self._arriving()
        self._inputs = _watched(each for _, tensors in received.values() for each in tensors)
        sent = self._stage.forward(0, self._microbatch, received, keep_output=False)
        self._sent = {name: spec for name, (spec, _) in sent.items()}
        messages = [
            described.in_memory(tensor)
            for spec, tensors in sent.values()
            for described, tensor in zip(spec.tensors, tensors, strict=True)
        ]
        del sent
        with_messages = self._counter.now
        del messages
        self._beyond = with_messages - self._counter.now

    def _input(self) -> None:
        self._stage.backward_input(0, self._gradients())

    def _weight(self) -> None:
        self._stage.backward_weight(0)

    def _whole(self) -> None:
        self._stage.backward(0, self._gradients())

    def _gradients(self) -> dict[str, list[Tensor]]:
        made = {name: _empty(spec.gradients()) for name, spec in self._sent.items()}
        self._grads = _watched(each for tensors in made.values() for each in tensors)
        return made


def largest_of(tensors: Iterable[LargeTensor]) -> tuple[LargeTensor, ...]:
    """The largest of these, of which those that look alike are put together."""
    counts: Counter[LargeTensor] = Counter()
    for each in tensors:
        counts[replace(each, count=1)] += each.count
    largest = sorted(counts, key=lambda each: -each.nbytes)[:SHOWN]
    return tuple(replace(each, count=counts[each]) for each in largest)


def _called(part: nn.Module) -> Iterator[nn.Module]:
    """The modules of a stage that the model's forward calls; others merely hold some of them."""
    for child in part.children():
        if type(child) is nn.Module:
            yield from _called(child)
        else:
            yield child


def _watched(tensors: Iterable[Tensor]) -> list[Watched]:
    """The storages of tensors, which are not held."""
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors]


def _live(storages: Iterable[Watched]) -> bool:
    return any(each() is not None for each in storages)


def _empty(spec: Spec) -> list[Tensor]:
    return [each.empty(_CPU) for each in spec.tensors]
