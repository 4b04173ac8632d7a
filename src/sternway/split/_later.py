"""How one operand's gradient is computed in W, and the tensors that this takes."""

from __future__ import annotations

from collections.abc import Callable, Set

from torch import Tensor

from sternway._storage import lies_in
from sternway._torch.tensors import detached, version_of
from sternway.saved import Packed


class Later:
    """One operand's gradient, computed in W as ``compute(grad, *kept)``.

    ``grad`` is the gradient of the node's output, which I computed. ``kept`` is what W needs beside it. Pass tensors
    here rather than closing over them, so that ``Pending.nbytes`` counts them and the autograd graph is freed. What
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
        # A saved tensor comes with its grad_fn; keeping that would keep the graph alive.
        self.kept = tuple([detached(each) if isinstance(each, Tensor) else each for each in kept])
        self._versions = [version_of(each) if isinstance(each, Tensor) else 0 for each in self.kept]
        self.is_packed = any(isinstance(each, Packed) for each in self.kept)  # all of it, or some

    def unpack(self) -> None:
        """Unpack what is packed."""
        if self.is_packed:
            self._keep(*(each.unpack() if isinstance(each, Packed) else each for each in self.kept))

    def pack(self, pack: Callable[[Tensor], Packed]) -> None:
        """Pack what is kept, until ``unpack()``."""
        self._keep(*(pack(each) if isinstance(each, Tensor) else each for each in self.kept))

    def keep_apart(self, written: Set[int]) -> None:
        """Keep copies of what lies in one of these storages; a policy may have left some of it where it was."""
        for each in self.tensors():
            if lies_in(each, written):
                self.unpack()
                self._keep(*[each.clone() if isinstance(each, Tensor) else each for each in self.kept])
                break

    def tensors(self) -> list[Tensor]:
        """The tensors that are kept, and those that packed ones still hold on the device."""
        return [t for each in self.kept for t in ([each] if isinstance(each, Tensor) else each.tensors())]

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        """The operand's gradient, its last two dimensions swapped if ``transposed``."""
        value = self._compute(grad, *self.kept)
        return value.mT if transposed else value

    def was_changed(self) -> bool:
        """Whether a tensor was changed in place since it was kept."""
        return self._versions != [version_of(each) if isinstance(each, Tensor) else 0 for each in self.kept]


class Product(Later):
    """The gradient of one side of a matrix product ``y = scale * left @ right``, itself a matrix product.

    It is added to ``.grad`` in the kernel that computes it (``addmm_``), so that the gradient itself is never written
    to memory and read back. Pass the side that is known; the other is the one whose gradient this is.

    Example:
        >>> weight = Product(left=torch.ones(3, 2))
        >>> weight.gradient(torch.ones(3, 1)).shape
        torch.Size([2, 1])
    """

    __slots__ = ("_of_right", "scale")

    def __init__(
        self, *, left: Tensor | Packed | None = None, right: Tensor | Packed | None = None, scale: complex = 1
    ) -> None:
        known = left if right is None else right
        if known is None or (left is not None and right is not None):
            raise TypeError("Product takes one side of the product, left or right")
        self._of_right = right is None
        self.scale = scale
        if isinstance(known, Tensor):  # as _keep, written out: this runs for every product of every backward
            self.kept, self._versions, self.is_packed = (detached(known),), [version_of(known)], False
        else:
            self._keep(known)

    def gradient(self, grad: Tensor, transposed: bool = False) -> Tensor:
        left, right = self.factors(grad, transposed)
        value = left @ right
        return value if self.scale == 1 else value.mul_(self.scale)

    def was_changed(self) -> bool:
        known = self.kept[0]
        return isinstance(known, Tensor) and version_of(known) != self._versions[0]

    def factors(self, grad: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """The two matrices whose product, times ``scale``, is the gradient."""
        known: Tensor = self.kept[0]  # type: ignore[assignment]  # unpacked by now
        if known.is_complex():
            known = known.conj()
        if self._of_right:  # d right = leftᴴ grad
            return (grad.mT, known) if transposed else (known.mT, grad)
        return (known, grad.mT) if transposed else (grad, known.mT)  # d left = grad rightᴴ
