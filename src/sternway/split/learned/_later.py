"""W of a Function whose backward is called in two parts: one call, which gives the gradients of several weights."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import torch
from torch import Tensor

from sternway._storage import lies_in, storage_sizes
from sternway._torch.tensors import storage_uses, version_of
from sternway.errors import PendingError
from sternway.saved import Packed
from sternway.split._later import Later
from sternway.split._part import sum_to
from sternway.split.learned._call import BackwardCall, Flags
from sternway.split.learned._effects import RandomState
from sternway.split.learned._try import returns_only


class DeferredCall:
    """The weights' part of a call, which has yet to be made; once it is, those of its gradients that are not taken yet.

    Args:
        call: the call, its saved tensors as they are held until W.
        flags: which gradients it computes.
    """

    __slots__ = ("_asked", "_call", "_flags", "_found", "_name", "_versions")

    def __init__(self, call: BackwardCall, flags: Flags) -> None:
        self._asked = [each is not None and each.requires_grad for each in call.saved]
        self._call: BackwardCall | None = replace(call, saved=call.packed)
        self._flags, self._name = flags, call.function.__name__
        self._found: dict[int, Tensor] = {}
        self._versions = self._counted()

    @property
    def is_packed(self) -> bool:
        """Whether some of what is held is packed."""
        return self._call is not None and any(isinstance(each, Packed) for each in _held(self._call))

    def pack(self, pack: Callable[[Tensor], Packed]) -> None:
        """Pack what is held, until ``unpack()``; parameters, and what the forward put on ``ctx``, stay."""

        def packed(each: Tensor | None) -> Tensor | Packed | None:
            return each if each is None or isinstance(each, torch.nn.Parameter | Packed) else pack(each)

        if (call := self._call) is not None:
            grads, saved = tuple(map(packed, call.grads)), tuple(map(packed, call.saved))
            self._call = replace(call, grads=grads, saved=saved)  # type: ignore[arg-type]  # until unpack()
            self._versions = self._counted()

    def unpack(self) -> None:
        """Unpack what is packed."""
        if (call := self._call) is None or not self.is_packed:
            return
        grads = [each.unpack() if isinstance(each, Packed) else each for each in call.grads]
        saved = []
        for each, asked in zip(call.saved, self._asked, strict=True):
            saved.append(each.unpack().detach().requires_grad_(asked) if isinstance(each, Packed) else each)
        self._call = replace(call, grads=tuple(grads), saved=tuple(saved))
        self._versions = self._counted()

    def tensors(self) -> list[Tensor]:
        """The tensors that are held."""
        if self._call is None:
            return list(self._found.values())
        held = [each.tensors() if isinstance(each, Packed) else [each] for each in _held(self._call)]
        return [tensor for tensors in held for tensor in tensors if not _is_frozen(tensor)]

    def keep_apart(self, written: Set[int]) -> None:
        """Make the call now if it reads what lies in one of these storages."""
        if self._call is not None and any(lies_in(each, written) for each in self.tensors()):
            self._make()

    def was_changed(self) -> bool:
        """Whether a tensor was changed in place since I."""
        return self._call is not None and self._versions != self._counted()

    def take(self, index: int) -> Tensor:
        """The gradient of one input of the forward; each can be taken once. The first time, the call is made."""
        if self._call is not None:
            self._make()
        return self._found.pop(index)

    def _counted(self) -> list[int]:
        held = [] if self._call is None else _held(self._call)
        return [version_of(each) if isinstance(each, Tensor) else 0 for each in held]

    def _make(self) -> None:
        self.unpack()
        call, self._call = self._call, None
        assert call is not None
        tensors = call.tensors()
        versions, randomness = [version_of(each) for each in tensors], RandomState(call.device)
        found = call.run(self._flags)
        is_changed = versions != [version_of(each) for each in tensors] or randomness.was_used()
        if is_changed or not returns_only(found, self._flags):
            raise PendingError(
                "the weights' part of a backward must return their gradients alone, and change nothing",
                got=f"{self._name}, which did so when it was tried, and does not now",
                fix=f"call split.unlearn({self._name}) before training; its backward is then called whole",
            )
        inside = storage_sizes(tensors)
        for index, value in enumerate(found):
            if value is not None:
                shared = storage_uses(value) > _UNSHARED or not inside.keys().isdisjoint(storage_sizes([value]))
                self._found[index] = value.clone() if shared else value


def _held(call: BackwardCall) -> list[Tensor | Packed]:
    return [each for each in (*call.grads, *call.saved, *call.named()) if each is not None]


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


_UNSHARED = storage_uses(torch.empty(1))  # the count of a storage that one tensor holds


class CallGradient(Later):
    """The gradient of one weight, by a call that gives those of several.

    Args:
        call: the call.
        index: which input of the forward the weight is.
        shape: what the engine would sum the gradient to.
        dtype: what it would cast it to.
    """

    __slots__ = ("_dtype", "_index", "_of", "_shape")

    def __init__(self, call: DeferredCall, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._of, self._index, self._shape, self._dtype = call, index, shape, dtype
        self.is_packed = call.is_packed

    def pack(self, pack: Callable[[Tensor], Packed]) -> None:
        if not self._of.is_packed:  # by another weight of the same call
            self._of.pack(pack)
        self.is_packed = self._of.is_packed

    def unpack(self) -> None:
        self._of.unpack()
        self.is_packed = False

    def tensors(self) -> list[Tensor]:
        return self._of.tensors()

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        value = sum_to(self._of.take(self._index), self._shape).to(self._dtype)
        return value.mT if transposed else value

    def keep_apart(self, written: Set[int]) -> None:
        self._of.keep_apart(written)

    def was_changed(self) -> bool:
        return self._of.was_changed()
