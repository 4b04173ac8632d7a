"""What a node saved for its backward, read without unpacking: no hook runs, no checkpoint recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sternway._storage import dense_parts, storage_sizes, tensors_in
from sternway._torch.nodes import CHECKPOINT_HOLDER, raw_saved, read_saved, saved_label, saved_names
from sternway._torch.saved_hooks import checkpoint_inputs
from sternway._torch.tensors import storage_id
from sternway.graph._records import Role, Saved, TensorInfo


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _device(device: torch.device) -> str:
    return str(device)


class Reader:
    """Reads what nodes save, and numbers storages as it meets them; one for each capture."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Role, str, int]] = {}  # storage → what it belongs to, and that tensor's id
        self._infos: dict[Any, TensorInfo] = {}
        self._numbers: dict[int, int] = {}
        self._regions: set[int] = set()  # checkpointed regions whose inputs were counted

    def belongs(self, tensor: Tensor, role: Role, name: str) -> None:
        """Mark a tensor's storage as a parameter's or a buffer's: it is allocated with or without the graph."""
        for storage in storage_sizes([tensor]):
            self.known.setdefault(storage, (role, name, id(tensor)))

    def info(self, thing: Any) -> TensorInfo:
        """Shape, dtype and device of a tensor, or of one of a node's gradient slots."""
        shape = thing.shape
        key = (tuple(shape), thing.dtype, thing.device)
        try:
            found = self._infos.get(key)
        except TypeError:  # a symbolic shape
            return TensorInfo(None, _dtype(thing.dtype), _device(thing.device))
        if found is None:
            is_known = all(isinstance(size, int) for size in shape)  # a jagged dimension has a symbol
            sizes = tuple(shape) if is_known else None
            found = self._infos[key] = TensorInfo(sizes, _dtype(thing.dtype), _device(thing.device))
        return found

    def saved(self, node: Any) -> tuple[tuple[Saved, ...], bool]:
        """Everything that the node saved, and whether a backward has freed it already."""
        found: list[Saved] = []
        empty = 0
        for attribute in saved_names(node.__class__):
            try:
                slot = raw_saved(node, attribute)
            except (RuntimeError, AttributeError):  # freed, in a custom autograd.Function
                empty += 1
                continue
            if slot is None:
                continue
            name = saved_label(attribute)
            if isinstance(slot, tuple | list):
                for index, raw in enumerate(slot):
                    empty += self._read(raw, f"{name}[{index}]", found)
            elif type(data := slot.data) is Tensor and slot.unpack_hook is None:  # by far the most
                found.append(self._describe(data, name))
            else:
                empty += self._read(slot, name, found)
        if isinstance(node, BackwardCFunction):
            for name, value in node.__dict__.items():
                found += [self._describe(tensor, f"ctx.{name}") for tensor in tensors_in(value)]
        return tuple(found), empty > 0 and not found and is_freed(node)

    def _read(self, raw: Any, name: str, found: list[Saved]) -> bool:
        """Add what a ``SavedTensor`` holds to ``found``; return whether it is empty."""
        if raw is None:
            return False
        data, hook = raw.data, raw.unpack_hook
        if hook is None:
            if data is None:
                return True
            found.append(self._describe(data, name))
        elif isinstance(data, CHECKPOINT_HOLDER):
            found.append(Saved(name, TensorInfo(None, "", ""), 0, None, 0, hook="checkpoint"))
            found += self._checkpoint_inputs(hook)
        else:
            by = getattr(hook, "__qualname__", type(hook).__name__).split(".")[0]
            packed = [self._describe(tensor, name, by) for tensor in tensors_in(data)]
            found += packed or [Saved(name, TensorInfo(None, "", ""), 0, None, 0, hook=by)]
        return False

    def _checkpoint_inputs(self, hook: Any) -> Iterator[Saved]:
        """The inputs that a checkpointed region keeps in order to recompute; once for each region."""
        inputs = checkpoint_inputs(hook)
        if inputs is None or inputs.region in self._regions:
            return
        self._regions.add(inputs.region)
        for index, value in enumerate(inputs.values):
            for tensor in tensors_in(value):
                yield self._describe(tensor, f"checkpoint input {index}", "checkpoint")

    def _describe(self, tensor: Tensor, name: str, hook: str | None = None) -> Saved:
        info, part = self.info(tensor), tensor
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            parts = dense_parts(tensor)
            sizes = storage_sizes(parts)
            if len(parts) != 1 or not sizes:
                number = self._numbers.setdefault(id(tensor), len(self._numbers))
                size = sum(sizes.values())
                return Saved(name, info, size, number, size, hook=hook)
            part = parts[0]
        key, size = storage_id(part), part.untyped_storage().nbytes()
        number = self._numbers.setdefault(key, len(self._numbers))
        owner = self.known.get(key)
        if owner is None:
            return Saved(name, info, tensor.nbytes, number, size, hook=hook)
        role, of, identity = owner
        return Saved(name, info, tensor.nbytes, number, size, role, of, id(tensor) != identity, hook)


def is_freed(node: Any) -> bool:
    """Whether a backward has freed what the node saved. Only empty slots are unpacked to find out."""
    for attribute in saved_names(node.__class__):
        try:
            raw = raw_saved(node, attribute)
            if not isinstance(raw, tuple | list) and raw is not None and raw.data is None and raw.unpack_hook is None:
                read_saved(node, saved_label(attribute))  # None where there was nothing to save
        except RuntimeError:
            return True
    return False


def storage_of(tensor: Tensor) -> int | None:
    """Which storage a tensor has; None if it has none of its own."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):
        return None
