"""The pair of hooks that torch calls: from a tensor to what autograd holds in its place, and back.

For each tensor the stack of policies is asked, in this order: which of the user's own hooks to call; whether to leave
the tensor alone; which policy encodes it; which policy moves it. The innermost policy that covers the tensor decides,
except that ``keep`` always wins.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch.tensors import version_of
from sternway.errors import SavedError
from sternway.saved._policy import PolicyStack
from sternway.saved._slot import Slot, View
from sternway.saved.policies._compress import Compress
from sternway.saved.policies._hooks import Hooks
from sternway.saved.policies._keep import Keep
from sternway.saved.policies._mutable import Mutable
from sternway.saved.policies._offload import Offload


class Packed:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("_at_version", "_hooks", "_kept", "_slot", "_view", "_watched")

    def __init__(self, kept: Any, slot: Slot | None, view: View | None, hooks: Hooks | None) -> None:
        self._kept, self._slot, self._view, self._hooks = kept, slot, view, hooks
        self._at_version = version_of(kept) if isinstance(kept, Tensor) else 0
        self._watched: tuple[tuple[Tensor, int], ...] = ()

    def watch(self, alias: Tensor) -> None:
        """Take the tensor for changed, too, if this one is, which has the same memory but counts by itself."""
        if self._slot is not None:
            self._slot.content.watch(alias)
        elif isinstance(self._kept, Tensor):
            self._watched += ((alias, version_of(alias)),)

    def unpack(self) -> Tensor:
        """The tensor, on its device.

        Raises:
            SavedError: it was changed in place after it was saved; autograd has the same error.
        """
        value = self._kept
        if self._slot is not None:
            assert self._view is not None
            value = self._view.on(self._slot.flat())
        elif self.is_changed:
            raise SavedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation",
                got=f"a saved tensor of shape {tuple(value.shape)}, at version {version_of(value)}, saved at version "
                f"{self._at_version}",
                fix="change a copy, or run the forward and the change under saved.mutable()",
            )
        return self._hooks.unpack_hook(value) if self._hooks is not None else value

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place after it was saved, and there was no copy of it."""
        kept = self._kept
        if self._slot is not None:
            return self._slot.content.is_changed
        if not isinstance(kept, Tensor) or self._hooks is not None:
            return False
        return version_of(kept) != self._at_version or any(version_of(t) != before for t, before in self._watched)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on the device now."""
        if self._slot is not None:
            content = self._slot.content
            return content.nbytes if content.data is not None else 0
        return self._kept.untyped_storage().nbytes() if isinstance(self._kept, Tensor) else 0

    def tensors(self) -> list[Tensor]:
        """The tensors on the device that it holds."""
        held = self._slot.content.data if self._slot is not None else self._kept
        return [held] if isinstance(held, Tensor) else []


def unpack(packed: Packed) -> Tensor:
    """The unpack hook."""
    return packed.unpack()


def pack_under(stack: PolicyStack, tensor: Tensor) -> Packed:
    """Pack a tensor as a stack of policies says."""
    policies = stack.policies
    hooks = next((policy for policy in reversed(policies) if isinstance(policy, Hooks)), None)
    if hooks is not None:
        value = hooks.pack_hook(tensor)
        if not isinstance(value, Tensor):
            return Packed(value, None, None, hooks)
        tensor = value
    kept = tensor.detach() if hooks is None else tensor  # what a user's hook returned is the object it was
    name = stack.names.current()
    line = stack.report.line(name)
    # On a GPU, what a backward saves comes from a thread of the engine; policies are of the thread that entered them.
    reason = _unfit(tensor) if threading.get_ident() == stack.thread else "other thread"
    if reason is not None:
        line.skip(reason, _size(tensor))
        return Packed(kept, None, None, hooks)
    mutables = [policy for policy in policies if isinstance(policy, Mutable)]
    offload, compress, reason = _choose(stack, tensor, name)
    codec = compress.codec_for(tensor) if compress is not None else None
    lossless = compress is not None and compress.lossless
    if lossless and offload is None and compress is not None:
        compress.need_disk(policies)
    if offload is None and codec is None and not mutables:
        line.skip(reason, _size(tensor))
        return Packed(kept, None, None, hooks)
    home = offload or (compress if codec is not None else mutables[-1])
    assert home is not None
    slot, view = home.slots.save(tensor, codec, line, offload.offloader if offload else None, lossless=lossless)
    for mutable in mutables:
        mutable.look_after(slot, tensor)
    return Packed(None, slot, view, hooks)


def _choose(stack: PolicyStack, tensor: Tensor, name: str) -> tuple[Offload | None, Compress | None, str]:
    """Which policy moves the tensor, which encodes it, and why there is neither, if so."""
    policies = stack.policies
    if any(isinstance(policy, Keep) and name in policy.where for policy in policies):
        return None, None, "kept"
    if stack.names.owns(tensor):
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
        elif policy.spares(tensor):
            reason = "held anyway"
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
    try:
        address = storage.data_ptr()
    except RuntimeError:  # what torch.func computes with has none
        return "layout"
    if not address or storage.nbytes() % tensor.element_size():
        return "layout"
    return None


def _size(tensor: Tensor) -> int:
    """The bytes that keeping the tensor keeps."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return 0
