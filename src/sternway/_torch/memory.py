"""Tensors without memory, and the bytes that operations would take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
    return is_without_memory(one) or torch.equal(one, other)


def is_without_memory(tensor: Tensor) -> bool:
    """Whether nobody can read the values of a tensor: it has none."""
    if type(tensor) is Tensor:  # as nearly all are
        return tensor.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def counts_operations(operator: Any) -> bool:
    """Whether an operator is a product, a convolution or attention, or has a formula for its operations."""
    packet = getattr(operator, "_overloadpacket", operator)
    return packet in flop_registry or str(packet) in _UNCOUNTED


_UNCOUNTED = "aten._scaled_dot_product_flash_attention_for_cpu", "aten._grouped_mm"  # without a formula


def dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout of a call of an operator that may draw random numbers, 1 if it may draw others; else 0."""
    # cuDNN's attention is not known to leave the generator alone without dropout; torch's other kernels do.
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return 0.0
    for place, argument in enumerate(operator._schema.arguments if "cudnn" not in str(operator) else ()):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given)
    return 1.0


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

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, which were there before, when an operation returns a view of one."""
        for tensor in tensors:
            self._note(tensor, nbytes=0)

    def _note(self, tensor: Tensor, nbytes: int | None = None) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        if key in self._living:
            return
        nbytes = storage.nbytes() if nbytes is None else nbytes
        self._living.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._living.discard(key)
        self.now -= nbytes


@probe(
    "FakeTensorMode, TorchDispatchMode, _disable_current_modes, OpOverload._overloadpacket and _schema",
    expected="make tensors without memory, and see each operation, its name and its arguments",
    features=("pipeline.fit",),
)
def _counted() -> bool:
    with without_memory(), OperationCounter() as counter:
        made = torch.empty(2**20, 2**20, dtype=torch.int8) + 1
        held = counter.now
        del made
        torch.empty(2, 3) @ torch.empty(3, 4)
        counted = (held, counter.now, counter.peak, counter.flops) == (2**40, 0, 2**41, 48)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    named = counts_operations(attention) and dropout_of(attention, (None, None, None, 0.5), {}) == 0.5
    return counted and named and dropout_of(attention, (), {}) == 0 and len(rng_state()) > 8
