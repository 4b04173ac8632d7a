"""One storage, saved once however many tensors share it.

A saved tensor is taken apart into its storage, which a ``Slot`` stands for, and its shape upon it, a ``View``. The
slot's bytes (``SavedBytes``) may be the user's own storage, a copy of it, an encoding of it, or off the device; views
are put back onto whatever the bytes come back as.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sternway._torch.tensors import base_of, conjugate_view, is_view, negative_view, storage_address, version_of
from sternway.saved._content import SavedBytes
from sternway.saved.policies._codecs import Codec

if TYPE_CHECKING:
    from sternway.saved._offloader import Offloader
    from sternway.saved._report import Line

_FRAGMENT = 8  # what spans less than this part of its storage is saved alone


class View(NamedTuple):
    """A tensor's shape upon a storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def on(self, flat: Tensor) -> Tensor:
        """The tensor, on the storage of ``flat``."""
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        tensor.set_(flat.untyped_storage(), self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = conjugate_view(tensor)
        return negative_view(tensor) if self.negated else tensor


def view_of(tensor: Tensor) -> View:
    """A tensor's shape upon its storage."""
    return View(
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


class Extent(NamedTuple):
    """What to save for a tensor: its storage, whole or in part."""

    tensor: Tensor
    view: View  # the tensor's shape upon those bytes
    key: Hashable  # the same for tensors that share a slot
    part: slice | None  # the bytes of the storage to copy; None for all of it, not copied

    def flat(self) -> Tensor:
        """The bytes to save."""
        flat = flat_bytes(self.tensor)
        return flat if self.part is None else flat[self.part].clone()


def extent_of(tensor: Tensor, codec: Codec | None) -> Extent:
    """What to save for ``tensor``: its whole storage, or a copy of its own bytes.

    A storage and a version name one content only if all tensors that write to the storage share a version counter.
    Views and their base do. The parts that ``unsafe_split`` makes do not, so each is saved alone, as a copy. So is a
    tensor that spans a small part of a large storage.
    """
    storage = tensor.untyped_storage()
    base = base_of(tensor) if is_view(tensor) else tensor
    treatment = (codec.name, tensor.dtype) if codec is not None else None
    size = storage.nbytes()
    key: tuple[Hashable, ...] = (storage_address(storage), storage.data_ptr(), size, version_of(tensor), treatment)
    view, item = view_of(tensor), tensor.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    whole = base is not None and base.nbytes == size
    if whole and span * item * _FRAGMENT >= size:
        return Extent(tensor, view, key, None)
    start = view.offset * item
    return Extent(tensor, view._replace(offset=0), (*key, view), slice(start, start + span * item))


def flat_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``, as bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class Slot:
    """One storage at one version, as long as some saved tensor needs it."""

    __slots__ = ("__weakref__", "_offloader", "_storage", "content", "is_over")

    def __init__(self, content: SavedBytes, tensor: Tensor, offloader: Offloader | None) -> None:
        self.content, self._offloader = content, offloader
        self.is_over = False  # the storage was written to since: what is saved from now on is another content
        # A weak reference keeps the storage's address from being given to another one, so that the address names it.
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if offloader is not None:
            offloader.admit(content)

    def own(self) -> None:
        """Copy the bytes, because the user's storage is about to be written to."""
        self.is_over = True  # a write through .data counts no version that would tell
        content = self.content
        if content.is_users and (self._offloader is None or not self._offloader.settle(content)):
            content.own()

    def flat(self) -> Tensor:
        """The storage's bytes on the device, decoded."""
        content = self.content
        data = content.data if self._offloader is None else self._offloader.fetch(content)
        assert data is not None  # only an offloader moves it
        return content.decoded(data)

    def __del__(self) -> None:
        if self._offloader is None:
            self.content.free()
        else:
            self._offloader.dropped(self.content)


class Slots:
    """The slots alive, by storage, version and codec: what is saved again is found again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[Hashable, Slot] = weakref.WeakValueDictionary()

    def save(
        self, tensor: Tensor, codec: Codec | None, line: Line, offloader: Offloader | None, *, lossless: bool
    ) -> tuple[Slot, View]:
        """The slot for the tensor's storage, made if there is none, and the tensor's shape upon it."""
        with self._lock:
            extent = extent_of(tensor, codec)
            slot = self._known.get(extent.key)
            if slot is not None and not slot.is_over:
                line.again(tensor.nbytes)
            else:
                whole = tensor if extent.part is None and codec is None else None
                content = SavedBytes(extent.flat(), tensor.dtype, whole, codec, line, lossless=lossless)
                slot = Slot(content, tensor, offloader)
                self._known[extent.key] = slot
            slot.content.saved()
        return slot, extent.view

    def __len__(self) -> int:
        return len(self._known)
