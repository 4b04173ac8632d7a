"""Tensors without memory, and the bytes that operations would take."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from sternway._torch.probe import probe
from sternway._torch.tensors import storage_id


def without_memory() -> AbstractContextManager[Any]:
    """A block in which tensors that are made have a shape, a dtype and a device, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def rng_state() -> bytes:
    """The state of the CPU's generator of random numbers, also where tensors have no memory."""
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; those without memory have none that differ."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(one, FakeTensor) or one.is_meta or torch.equal(one, other)


class OperationCounter(TorchDispatchMode):
    """A block in which operations are counted, and the bytes of the storages that they make, for as long as they live.

    torch's own counter of operations puts hooks on modules, which change what is counted here.

    Attributes:
        now: the bytes of the storages that live.
        peak: the most since it was last set.
        flops: the floating-point operations of products, convolutions and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._living: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=made)
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self._note(each)
        return made

    def _note(self, tensor: Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        if key in self._living:
            return
        nbytes = storage.nbytes()
        self._living.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._living.discard(key)
        self.now -= nbytes


@probe(
    "FakeTensorMode, TorchDispatchMode, _disable_current_modes, OpOverload._overloadpacket",
    expected="make tensors without memory, and see each operation and its name",
    features=("pipeline.fit",),
)
def _counted() -> bool:
    with without_memory(), OperationCounter() as counter:
        made = torch.empty(2**20, 2**20, dtype=torch.int8) + 1
        held = counter.now
        del made
        torch.empty(2, 3) @ torch.empty(3, 4)
        return (held, counter.now, counter.peak, counter.flops) == (2**40, 0, 2**41, 48) and len(rng_state()) > 8
