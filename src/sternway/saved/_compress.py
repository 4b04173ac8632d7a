"""Fewer bytes for what is saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from sternway.errors import SavedError
from sternway.saved._codecs import BITS, LOSSY, Codec
from sternway.saved._policy import Policy
from sternway.saved._slot import Slots


class Compress(Policy):
    """Encodes saved tensors."""

    def __init__(
        self, codec: str, where: str | Iterable[str] | None, min_bytes: int | str, model: nn.Module | None
    ) -> None:
        super().__init__(where, min_bytes, model)
        if codec not in (*LOSSY, "lossless"):
            raise SavedError(
                "a codec is known by its name", got=repr(codec), fix=f"one of {', '.join([*LOSSY, 'lossless'])}"
            )
        self.lossless = codec == "lossless"
        self._codec = LOSSY.get(codec)
        self.slots = Slots()

    def codec_for(self, tensor: Tensor) -> Codec | None:
        """The codec for a tensor; None if it stays as it is."""
        if BITS.suits(tensor):
            return BITS
        return self._codec if self._codec is not None and self._codec.suits(tensor) else None

    def need_disk(self, policies: Sequence[Policy]) -> None:
        """Raise if nothing around could write to a disk: "lossless" is done on the way there."""
        if not any(hasattr(policy, "engine") and policy.engine.store.name == "disk" for policy in policies):
            raise SavedError(
                'compress("lossless") is for what goes to a disk',
                got="no offload around it that does",
                fix='use it with saved.offload(to="disk", directory=…)',
            )


def compress(
    codec: str,
    *,
    where: str | Iterable[str] | None = None,
    min_bytes: int | str = "4KiB",
    model: nn.Module | None = None,
) -> Compress:
    """Keep saved tensors in fewer bytes; what the backward sees differs by no more than the codec's error.

    Example:
        >>> from sternway import saved
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with saved.compress("int8") as report:
        ...     y = x.exp().sum()
        >>> y.backward()
        >>> bool((x.grad - x.exp()).abs().max() <= x.exp().max() / 252)
        True

    Args:
        codec: "bf16", "fp8", "int8": see ``_codecs`` for bytes and errors; or "lossless", exact, for what goes to disk.
            Booleans, and masks of zeros and one other number, take a bit each, exactly, under any of them. Integers
            stay as they are.
        where: patterns for the names of the modules whose tensors are encoded; all, unless given. Nest several
            policies to choose by module; the innermost that covers a tensor decides.
        min_bytes: smaller tensors stay as they are.
        model: whose names ``where`` means; the outermost module that is called, unless given.

    Returns:
        A policy: a context manager that gives a ``Report``, for any number of steps.

    Raises:
        SavedError: an unknown codec.
    """
    return Compress(codec, where, min_bytes, model)
