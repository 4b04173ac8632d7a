"""What a node keeps, read without unpacking: no hook runs, no checkpoint recomputes, nothing changes.

``node._saved_x`` would unpack; ``node._raw_saved_x`` does not. Its ``data`` is the tensor, or what a pack hook made of
it; None once a backward has let it go.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from sternway.graph._records import Role, Saved, TensorInfo

_PREFIX = "_raw_saved_"


@cache
def slots(node_type: Hashable) -> tuple[tuple[str, str], ...]:
    """The node type's slots for saved tensors: attribute, and the name to show."""
    return tuple((name, name.removeprefix(_PREFIX)) for name in dir(node_type) if name.startswith(_PREFIX))


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _device(device: torch.device) -> str:
    return str(device)


class Reader:
    """Reads what nodes save, numbering storages as it meets them, for one capture."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Role, str, int]] = {}  # storage → what it belongs to, and that tensor's id
        self._infos: dict[Any, TensorInfo] = {}
        self._numbers: dict[int, int] = {}
        self._frames: set[int] = set()

    def belongs(self, tensor: Tensor, role: Role, name: str) -> None:
        """Say whose a tensor is: a parameter's or a buffer's bytes are there with or without the graph."""
        for part in _plain(tensor):
            if (address := _address(part)) is not None:
                self.known.setdefault(address, (role, name, id(tensor)))

    def info(self, thing: Any) -> TensorInfo:
        """Of a tensor, or of an entry of ``node._input_metadata``."""
        shape = thing.shape
        key = (tuple(shape), thing.dtype, thing.device)
        try:
            found = self._infos.get(key)
        except TypeError:  # a shape with symbols in it
            return TensorInfo(None, _dtype(thing.dtype), _device(thing.device))
        if found is None:
            found = self._infos[key] = TensorInfo(tuple(map(int, shape)), _dtype(thing.dtype), _device(thing.device))
        return found

    def saved(self, node: Any) -> tuple[tuple[Saved, ...], bool]:
        """Everything the node keeps, and whether a backward has already freed it."""
        found: list[Saved] = []
        empty = 0
        for attribute, name in slots(node.__class__):
            try:
                slot = getattr(node, attribute)
            except (RuntimeError, AttributeError):  # freed, in a Python function
                empty += 1
                continue
            if slot is None:
                continue
            if isinstance(slot, tuple | list):
                for index, raw in enumerate(slot):
                    empty += self._read(raw, f"{name}[{index}]", found)
            elif type(data := slot.data) is Tensor and slot.unpack_hook is None:  # by far the most
                found.append(self._describe(data, name))
            else:
                empty += self._read(slot, name, found)
        if isinstance(node, BackwardCFunction):
            for name, value in node.__dict__.items():
                found += [self._describe(tensor, f"ctx.{name}") for tensor in _tensors(value)]
        return tuple(found), empty > 0 and not found and is_freed(node)

    def _read(self, raw: Any, name: str, found: list[Saved]) -> bool:
        """Add what the slot holds to ``found``; whether it holds nothing."""
        if raw is None:
            return False
        data, hook = raw.data, raw.unpack_hook
        if hook is None:
            if data is None:
                return True
            found.append(self._describe(data, name))
        elif isinstance(data, checkpoint._Holder):
            found.append(Saved(name, TensorInfo(None, "", ""), 0, None, 0, hook="checkpoint"))
            found += self._checkpoint_inputs(hook)
        else:
            by = getattr(hook, "__qualname__", type(hook).__name__).split(".")[0]
            packed = [self._describe(tensor, name, by) for tensor in _tensors(data)]
            found += packed or [Saved(name, TensorInfo(None, "", ""), 0, None, 0, hook=by)]
        return False

    def _checkpoint_inputs(self, hook: Any) -> Iterator[Saved]:
        """What a checkpoint keeps in order to recompute: its region's inputs, once for each region."""
        frame = inspect.getclosurevars(hook).nonlocals.get("frame")
        if frame is None or id(frame) in self._frames:
            return
        self._frames.add(id(frame))
        saver = getattr(frame, "input_saver", None)
        if saver is None:
            kept = getattr(frame, "saved_args", ())
        else:  # torch 2.11 keeps them on the node of a dummy tensor, after the dummy itself
            kept = getattr(saver.grad_fn, "_raw_saved_tensors", ())[1:]
        for index, entry in enumerate(kept):
            data = entry if isinstance(entry, Tensor) else getattr(entry, "data", None)
            for tensor in _tensors(data):
                yield self._describe(tensor, f"checkpoint input {index}", "checkpoint")

    def _describe(self, tensor: Tensor, name: str, hook: str | None = None) -> Saved:
        info = self.info(tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
        else:
            parts = _plain(tensor)
            if len(parts) != 1 or _address(parts[0]) is None:
                size = sum(part.untyped_storage().nbytes() for part in parts if _address(part) is not None)
                return Saved(
                    name, info, size, self._numbers.setdefault(id(tensor), len(self._numbers)), size, hook=hook
                )
            storage = parts[0].untyped_storage()
        address = storage._cdata
        number = self._numbers.setdefault(address, len(self._numbers))
        owner = self.known.get(address)
        if owner is None:
            return Saved(name, info, tensor.nbytes, number, storage.nbytes(), hook=hook)
        role, of, identity = owner
        return Saved(name, info, tensor.nbytes, number, storage.nbytes(), role, of, id(tensor) != identity, hook)


def is_freed(node: Any) -> bool:
    """Whether a backward has let go of what the node saved. Only empty slots are unpacked to find out."""
    for attribute, _ in slots(node.__class__):
        try:
            raw = getattr(node, attribute)
            if not isinstance(raw, tuple | list) and raw is not None and raw.data is None and raw.unpack_hook is None:
                getattr(node, attribute.replace("_raw", "", 1))  # empty because there was nothing to save: None
        except RuntimeError:
            return True
    return False


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in what a hook packed or a function kept: itself, or in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if depth and isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part, depth - 1)]
    if depth and isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part, depth - 1)]
    return []


def _plain(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold its elements: itself, but for sparse ones and wrapper subclasses."""
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        if tensor.layout is torch.strided:
            return [tensor]
        with torch.no_grad():
            if tensor.layout is torch.sparse_coo:
                return [tensor._indices(), tensor._values()]
            if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
                rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
                outer = tensor.crow_indices() if rows else tensor.ccol_indices()
                return [outer, tensor.col_indices() if rows else tensor.row_indices(), tensor.values()]
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _plain(getattr(tensor, name))]


def _address(tensor: Tensor) -> int | None:
    """Which storage it is, while it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return None
