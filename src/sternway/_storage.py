"""The memory behind tensors: which storages, and how many bytes, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor

from sternway._torch.tensors import sparse_parts, storage_id

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold a tensor's elements: itself, but for sparse ones and wrapper subclasses."""
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        if tensor.layout is torch.strided:
            return [tensor]
        with torch.no_grad():
            if tensor.layout is torch.sparse_coo:
                return list(sparse_parts(tensor))
            if tensor.layout in _COMPRESSED:
                rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
                outer = tensor.crow_indices() if rows else tensor.ccol_indices()
                return [outer, tensor.col_indices() if rows else tensor.row_indices(), tensor.values()]
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in flatten()[0]]  # a DTensor's mesh is among them
    return [part for each in inner if isinstance(each, Tensor) for part in dense_parts(each)]


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage behind ``tensors``, by the storage's number; what has no storage is passed over.

    Example:
        >>> tensor = torch.zeros(4)
        >>> list(storage_sizes([tensor, tensor[:2]]).values())
        [16]
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in dense_parts(tensor):
            try:
                sizes[storage_id(part)] = part.untyped_storage().nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor without storage
                continue
    return sizes


def lies_in(tensor: Tensor, storages: Set[int]) -> bool:
    """Whether a tensor has one of these storages, given by number."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        try:
            return storage_id(tensor) in storages
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return False
    return not storages.isdisjoint(storage_sizes([tensor]))


def storage_bytes(tensors: Iterable[Tensor], apart: Iterable[Tensor] = ()) -> int:
    """Bytes behind ``tensors``, each storage once, those of ``apart`` not counted."""
    skip = storage_sizes(apart)
    return sum(size for key, size in storage_sizes(tensors).items() if key not in skip)


def tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in what a hook packed or a function kept: any object, so containers are opened to a fixed depth."""
    if isinstance(value, Tensor):
        return [value]
    if depth and isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part, depth - 1)]
    if depth and isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_in(part, depth - 1)]
    return []
