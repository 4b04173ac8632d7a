"""One storage, saved once however many tensors share it.

A saved tensor is taken apart into its storage, which a ``Slot`` stands for, and its shape upon it, a ``View``. The
slot's bytes may be the user's own storage, a copy of it, an encoding of it, or away in a store; views are put back onto
whatever the bytes come back as.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sternway.errors import SavedError
from sternway.saved._codecs import Codec

if TYPE_CHECKING:
    from sternway.saved._engine import Engine
    from sternway.saved._report import Line
    from sternway.saved._store import Away

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
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


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


class Source(NamedTuple):
    """What to save for a tensor: its storage, whole or in part, the shape upon it, and what names it."""

    tensor: Tensor
    view: View
    key: Hashable
    part: slice | None  # of the storage's bytes: a copy of these alone

    def flat(self) -> Tensor:
        """The bytes to save."""
        flat = flat_bytes(self.tensor)
        return flat if self.part is None else flat[self.part].clone()


def source_of(tensor: Tensor, codec: Codec | None) -> Source:
    """What to save for ``tensor``: its whole storage, or a copy of its own bytes.

    A storage at a version has one content only if all who write to it count together. Views and their base do. The
    parts that ``unsafe_split`` makes do not: each is like a tensor of its own, and only the part is saved. So is what
    spans a small part of a large storage.
    """
    storage = tensor.untyped_storage()
    base = tensor._base if tensor._is_view() else tensor
    treatment = (codec.name, tensor.dtype) if codec is not None else None
    key: tuple[Hashable, ...] = (storage._cdata, storage.data_ptr(), storage.nbytes(), tensor._version, treatment)
    view, item = view_of(tensor), tensor.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    whole = base is not None and base.nbytes == storage.nbytes()
    if whole and span * item * _FRAGMENT >= storage.nbytes():
        return Source(tensor, view, key, None)
    start = view.offset * item
    return Source(tensor, view._replace(offset=0), (*key, view), slice(start, start + span * item))


def flat_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``, as bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class Slot:
    """One storage as it was at one version."""

    __slots__ = (
        "__weakref__",
        "_alias",
        "_source",
        "_version",
        "away",
        "changed",
        "codec",
        "counted",
        "dtype",
        "engine",
        "line",
        "lossless",
        "nbytes",
        "number",
        "packs",
        "payload",
        "raw_bytes",
        "uses",
    )

    def __init__(self, source: Source, codec: Codec | None, line: Line) -> None:
        self.engine: Engine | None = None
        self.away: Away | None = None
        self.counted = False  # in the report, as being on the device, without an engine
        self.line = line
        tensor = source.tensor
        self.dtype = tensor.dtype
        self.codec = codec
        self.changed = False
        self.lossless = False
        self.packs = self.uses = 0
        """Saved tensors on this slot, and how many of them the backward has yet to ask for."""
        self.number = -1
        self._alias: Tensor | None = None
        self._version = 0
        # A weak reference keeps the storage's address from being given to another one, so that the address names it.
        self._source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        flat = source.flat()
        self.raw_bytes = flat.numel()
        self.payload: Tensor | None
        """The bytes on the device; None while they are away."""
        if codec is None:
            self.payload = flat
            if source.part is None:
                self._alias, self._version = tensor.detach(), tensor._version  # .detach() shares the version
        else:
            self.payload = codec.encode(flat.view(tensor.dtype))
        self.nbytes = self.payload.numel()

    def check(self) -> None:
        """Note it if the bytes, still the user's own, were changed in place."""
        if self._alias is not None and self._alias._version != self._version:
            self.changed = True

    def release(self) -> None:
        """Let go of the bytes on the device: they are away by now."""
        self.check()
        self.payload = self._alias = None

    def own(self) -> None:
        """Take a copy of the bytes, because the user's storage is about to be written to."""
        if self.payload is None or self._alias is None:
            return
        if self.engine is not None and self.engine.settle(self):
            return
        self.check()
        self.payload = self.payload.clone()
        self._alias = None

    def flat(self) -> Tensor:
        """The storage's bytes on the device, decoded."""
        payload = self.payload if self.engine is None else self.engine.fetch(self)
        assert payload is not None  # only an engine sends it away
        self.check()
        if self.changed:
            raise SavedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation",
                got=f"a saved tensor of {self.line.module or 'no module'} that was changed after it was saved",
                fix="change a copy, or run the forward and the change under saved.mutable()",
            )
        return payload if self.codec is None else self.codec.decode(payload, self.raw_bytes, self.dtype)

    def __del__(self) -> None:
        if self.engine is not None:
            self.engine.dropped(self.number, self.nbytes, self.away, self.payload, self.line)
        elif self.counted:
            self.line.hold(-self.nbytes)


class Slots:
    """The slots alive, by storage, version and treatment: what is saved again is found again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[Hashable, Slot] = weakref.WeakValueDictionary()

    def find(self, key: Hashable) -> Slot | None:
        return self._known.get(key)

    def add(self, key: Hashable, slot: Slot) -> None:
        self._known[key] = slot

    def __len__(self) -> int:
        return len(self._known)
