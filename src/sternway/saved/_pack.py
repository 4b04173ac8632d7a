"""From a tensor to what autograd holds in its place, and back: the pair of hooks that torch calls.

For each tensor the stack of policies is asked, in this order: a user's own hooks; then whether the tensor is one to
leave alone; then who encodes it; then who moves it. The innermost policy that covers the tensor decides, except that
``keep`` always wins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import SavedError
from sternway.saved._codecs import Codec
from sternway.saved._compress import Compress
from sternway.saved._mutable import Mutable
from sternway.saved._offload import Offload
from sternway.saved._policy import Block, Hooks, Keep, active
from sternway.saved._report import Line
from sternway.saved._slot import Slot, Slots, View, source_of


class Packed:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("_hooks", "_kept", "_slot", "_version", "_view")

    def __init__(self, kept: Any, slot: Slot | None, view: View | None, hooks: Hooks | None) -> None:
        self._kept, self._slot, self._view, self._hooks = kept, slot, view, hooks
        self._version = kept._version if isinstance(kept, Tensor) else 0

    def unpack(self) -> Tensor:
        """The tensor, on its device.

        Raises:
            SavedError: it was changed in place after it was saved, as autograd says too.
        """
        value = self._kept
        if self._slot is not None:
            assert self._view is not None
            value = self._view.on(self._slot.flat())
        elif isinstance(value, Tensor) and value._version != self._version:
            raise SavedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation",
                got=f"a saved tensor of shape {tuple(value.shape)}, at version {value._version}, saved at version "
                f"{self._version}",
                fix="change a copy, or run the forward and the change under saved.mutable()",
            )
        return self._hooks.unpack_hook(value) if self._hooks is not None else value

    @property
    def nbytes(self) -> int:
        """Bytes that this holds on the device now."""
        if self._slot is not None:
            return self._slot.nbytes if self._slot.payload is not None else 0
        return self._kept.untyped_storage().nbytes() if isinstance(self._kept, Tensor) else 0

    def tensors(self) -> list[Tensor]:
        """The tensors on the device that this holds."""
        held = self._slot.payload if self._slot is not None else self._kept
        return [held] if isinstance(held, Tensor) else []


def pack(tensor: Tensor) -> Packed:
    """The pack hook."""
    return pack_under(active(), tensor)


def unpack(packed: Packed) -> Tensor:
    """The unpack hook."""
    return packed.unpack()


def pack_under(block: Block, tensor: Tensor) -> Packed:
    """Pack a tensor under a block's policies."""
    policies = block.policies
    if not policies:  # left by a block that is over, in a region that torch runs late
        return Packed(tensor.detach(), None, None, None)
    hooks = next((policy for policy in reversed(policies) if isinstance(policy, Hooks)), None)
    if hooks is not None:
        value = hooks.pack_hook(tensor)
        if not isinstance(value, Tensor):
            return Packed(value, None, None, hooks)
        tensor = value
    name = block.names.current()
    line = block.report.line(name)
    if (reason := _unfit(tensor)) is not None:
        line.skip(reason, _size(tensor))
        return Packed(tensor.detach(), None, None, hooks)
    mutables = [policy for policy in policies if isinstance(policy, Mutable)]
    offload, compress, reason = _choose(block, tensor, name)
    codec = compress.codec_for(tensor) if compress is not None else None
    lossless = compress is not None and compress.lossless
    if lossless and offload is None and compress is not None:
        compress.need_disk(policies)
    if offload is None and codec is None and not mutables:
        line.skip(reason, _size(tensor))
        return Packed(tensor.detach(), None, None, hooks)
    home = offload or (compress if codec is not None else mutables[-1])
    assert home is not None
    slot, view = _slot_of(home.slots, tensor, codec, line, offload, lossless)
    for mutable in mutables:
        mutable.look_after(slot, tensor)
    return Packed(None, slot, view, hooks)


def _slot_of(
    slots: Slots, tensor: Tensor, codec: Codec | None, line: Line, offload: Offload | None, lossless: bool
) -> tuple[Slot, View]:
    """The slot that the tensor's storage has, or gets."""
    with slots.lock:
        source = source_of(tensor, codec)
        slot = slots.find(source.key)
        if slot is not None:
            line.again(tensor.nbytes)
        else:
            slot = Slot(source, codec, line)
            slots.add(source.key, slot)
            line.new(slot.raw_bytes, slot.nbytes, codec is not None)
            if offload is not None:
                slot.lossless = lossless
                offload.engine.admit(slot)
            else:
                slot.counted = True
                line.hold(slot.nbytes)
        slot.packs += 1
        slot.uses += 1
    return slot, source.view


def _choose(block: Block, tensor: Tensor, name: str) -> tuple[Offload | None, Compress | None, str]:
    """Who moves the tensor, who encodes it, and, if nobody does either, why."""
    policies = block.policies
    if any(isinstance(policy, Keep) and name in policy.where for policy in policies):
        return None, None, "kept"
    if block.names.owns(tensor):
        return None, None, "parameter"
    offload: Offload | None = None
    compress: Compress | None = None
    reason = "not asked"
    for policy in reversed(policies):
        if not isinstance(policy, Offload | Compress):
            continue
        if name not in policy.where:
            reason = "elsewhere"
        elif _size(tensor) < policy.min_bytes:
            reason = "small"
        elif isinstance(policy, Compress):
            compress = compress or policy
            reason = "incompressible"
        elif policy.is_there(tensor):
            reason = "already there"
        else:
            offload = offload or policy
    return offload, compress, reason


_PLAIN = (Tensor, nn.Parameter)


def _unfit(tensor: Tensor) -> str | None:
    """Why a tensor cannot be taken apart into a storage and a view, if it cannot."""
    if type(tensor) not in _PLAIN:
        return "subclass"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return "layout"
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not tensor.numel():
        return "empty"
    if not storage.data_ptr() or storage.nbytes() % tensor.element_size():
        return "layout"
    return None


def _size(tensor: Tensor) -> int:
    """The bytes that keeping the tensor keeps."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return 0
