"""A weight gradient that is known but not yet computed: what it needs, and how to compute it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sternway.saved import Packed


class Later:
    """One operand's gradient, to be computed in W as ``compute(grad, *kept)``.

    ``grad`` is the gradient of the node's output, caught in I. ``kept`` is what W needs beside it: hand tensors over
    here rather than closing over them, so that ``Pending.nbytes`` counts them and the autograd graph is let go. What
    ``sternway.saved`` packed stays packed until W.

    Example:
        >>> later = Later(lambda grad, x: x.t() @ grad, torch.ones(3, 2))
        >>> later.gradient(torch.ones(3, 1)).shape
        torch.Size([2, 1])
    """

    __slots__ = ("_compute", "_versions", "is_packed", "kept")

    def __init__(self, compute: Callable[..., Tensor], *kept: Tensor | Packed) -> None:
        self._compute = compute
        self._keep(*kept)

    def _keep(self, *kept: Tensor | Packed) -> None:
        # A saved tensor comes back with its history; holding that would hold the graph.
        self.kept = tuple([each.detach() if isinstance(each, Tensor) else each for each in kept])
        self._versions = [each._version if isinstance(each, Tensor) else 0 for each in self.kept]
        self.is_packed = any(isinstance(each, Packed) for each in self.kept)  # by a policy, at least in part

    def unpack(self) -> None:
        """Bring back what is packed."""
        if self.is_packed:
            self._keep(*(each.unpack() if isinstance(each, Packed) else each for each in self.kept))

    def pack(self, pack: Callable[[Tensor], Packed]) -> None:
        """Let a policy have what is kept."""
        self._keep(*(pack(each) if isinstance(each, Tensor) else each for each in self.kept))

    def tensors(self) -> list[Tensor]:
        """What is kept, as far as it is on the device."""
        return [t for each in self.kept for t in ([each] if isinstance(each, Tensor) else each.tensors())]

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        """The operand's gradient, its last two dimensions swapped if ``transposed``."""
        value = self._compute(grad, *self.kept)
        return value.mT if transposed else value

    def was_changed(self) -> bool:
        """Whether what was kept has been changed in place since."""
        return self._versions != [each._version if isinstance(each, Tensor) else 0 for each in self.kept]


class Product(Later):
    """The gradient of one side of a matrix product ``y = scale * left @ right``, itself a matrix product.

    It can be added to ``.grad`` as it is computed, which saves writing it out and reading it back, as the fused
    backward has to do. Pass the side that is known, and leave out the one whose gradient it is.

    Example:
        >>> weight = Product(left=torch.ones(3, 2))
        >>> weight.gradient(torch.ones(3, 1)).shape
        torch.Size([2, 1])
    """

    __slots__ = ("_of_right", "_scale")

    def __init__(
        self, *, left: Tensor | Packed | None = None, right: Tensor | Packed | None = None, scale: complex = 1
    ) -> None:
        known = left if right is None else right
        if known is None or (left is not None and right is not None):
            raise TypeError("Product takes one side of the product, left or right")
        self._of_right = right is None
        self._scale = scale
        if isinstance(known, Tensor):  # as _keep, for the one case that is on every backward's way
            self.kept, self._versions, self.is_packed = (known.detach(),), [known._version], False
        else:
            self._keep(known)

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        left, right = self._factors(grad, transposed)
        value = left @ right
        return value if self._scale == 1 else value.mul_(self._scale)

    def was_changed(self) -> bool:
        known = self.kept[0]
        return isinstance(known, Tensor) and known._version != self._versions[0]

    def adding(self, total: Tensor, grad: Tensor, transposed: bool) -> Callable[[], Tensor] | None:
        """A step that adds the gradient to ``total`` in place; None if the types or dimensions do not allow it.

        Under autocast they do not: the factors are 16-bit, the total 32-bit.
        """
        ndim = total.ndim
        if grad.dtype != total.dtype or grad.ndim != ndim or total.layout != torch.strided:
            return None
        add = total.addmm_ if ndim == 2 else total.baddbmm_
        left, right = self._factors(grad, transposed)
        return partial(add, left, right) if self._scale == 1 else partial(add, left, right, alpha=self._scale)

    def _factors(self, grad: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        known: Tensor = self.kept[0]  # type: ignore[assignment]  # unpacked by now
        if known.is_complex():
            known = known.conj()
        if self._of_right:  # d right = leftᴴ grad
            return (grad.mT, known) if transposed else (known.mT, grad)
        return (known, grad.mT) if transposed else (grad, known.mT)  # d left = grad rightᴴ


def storage_bytes(tensors: list[Tensor], apart: list[Tensor]) -> int:
    """Bytes behind ``tensors``, each storage once, those of ``apart`` not counted."""
    skip = {_storage(tensor)[0] for tensor in apart}
    sizes = dict(_storage(tensor) for tensor in tensors)
    return sum(size for key, size in sizes.items() if key not in skip)


def _storage(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout != torch.strided:  # a sparse gradient: no one storage, so its parts' bytes under its own name
        parts = (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()
        return id(tensor), sum(part.untyped_storage().nbytes() for part in parts)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
