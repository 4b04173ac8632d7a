"""A weight gradient that is known but not yet computed: what it needs, and how to compute it."""

from __future__ import annotations

from collections.abc import Callable

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

    __slots__ = ("_compute", "_versions", "kept")

    def __init__(self, compute: Callable[..., Tensor], *kept: Tensor | Packed) -> None:
        self._compute = compute
        self._keep(*kept)

    def _keep(self, *kept: Tensor | Packed) -> None:
        # A saved tensor comes back with its history; holding that would hold the graph.
        self.kept = tuple([t.detach() if isinstance(t, Tensor) else t for t in kept])
        self._versions = [t._version if isinstance(t, Tensor) else 0 for t in self.kept]

    def unpack(self) -> None:
        """Bring back what is packed."""
        if any(isinstance(kept, Packed) for kept in self.kept):
            self._keep(*(kept.unpack() if isinstance(kept, Packed) else kept for kept in self.kept))

    def pack(self, pack: Callable[[Tensor], Packed]) -> None:
        """Let a policy have what is kept."""
        self._keep(*(pack(kept) if isinstance(kept, Tensor) else kept for kept in self.kept))

    def tensors(self) -> list[Tensor]:
        """What is kept, as far as it is on the device."""
        return [t for kept in self.kept for t in ([kept] if isinstance(kept, Tensor) else kept.tensors())]

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        """The operand's gradient, its last two dimensions swapped if ``transposed``."""
        value = self._compute(grad, *self.kept)
        return value.mT if transposed else value

    def was_changed(self) -> bool:
        """Whether what was kept has been changed in place since."""
        return self._versions != [t._version if isinstance(t, Tensor) else 0 for t in self.kept]


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
        self._of_right = right is None
        self._scale = scale
        known = left if right is None else right
        if known is None or (left is not None and right is not None):
            raise TypeError("Product takes one side of the product, left or right")
        self._keep(known)

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        left, right = self._factors(grad, transposed)
        value = left @ right
        return value if self._scale == 1 else value.mul_(self._scale)

    def add_to(self, total: Tensor, grad: Tensor, transposed: bool) -> bool:
        """Add the gradient to ``total`` in place; False, and nothing done, if the types or dimensions do not allow it.

        Under autocast they do not: the factors are 16-bit, the total 32-bit.
        """
        if grad.dtype != total.dtype or grad.ndim != total.ndim or total.layout != torch.strided:
            return False
        left, right = self._factors(grad, transposed)
        if total.ndim == 2:
            total.addmm_(left, right, alpha=self._scale)
        else:
            total.baddbmm_(left, right, alpha=self._scale)
        return True

    def _factors(self, grad: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        known = self.kept[0]
        assert isinstance(known, Tensor)  # unpacked by now
        known = known.conj()  # for real numbers, the tensor itself
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
