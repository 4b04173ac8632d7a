"""Keep saved tensors in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from sternway.errors import SavedError
from sternway.saved._policy import Policy
from sternway.saved._slot import Slots
from sternway.saved.policies._codecs import BITS, LOSSY, Codec
from sternway.saved.policies._offload import Offload


class Compress(Policy):
    """Encodes saved tensors."""

    def __init__(
        self, codec: str, where: str | Iterable[str] | None, min_bytes: int | str, model: nn.Module | None
    ) -> None:
        super().__init__(where, min_bytes, model)
        if codec not in (*LOSSY, "lossless"):
            raise SavedError(
                "codec must be the name of a codec", got=repr(codec), fix=f"pass {', '.join(LOSSY)} or lossless"
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
        """Raise if no policy writes to a disk: "lossless" compresses on the way there."""
        if not any(isinstance(policy, Offload) and policy.offloader.store.name == "disk" for policy in policies):
            raise SavedError(
                'compress("lossless") needs a policy that moves tensors to a disk',
                got="none around it",
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
        >>> bool((x.grad - x.exp()).abs().max() <= x.exp().max() / 250)
        True

    Args:
        codec: "bf16", "fp8" or "int8" (2 bytes, 1 byte and 1 byte an element); or "lossless", exact, for what goes to
            disk. Under any of them booleans, and masks of zeros and one other number, take one bit an element, exactly.
            Integers stay as they are. Signs, zeros, infinities and NaN are kept.
        where: patterns for the names of the modules whose tensors are encoded; all, unless given. Nest policies to
            choose a codec by module; the innermost one that covers a tensor decides.
        min_bytes: smaller tensors stay as they are.
        model: the model whose names ``where`` means; the outermost module that is called, unless given.

    Returns:
        A policy: a context manager that gives a ``Report``, for any number of steps.

    Raises:
        SavedError: an unknown codec.
    """
    return Compress(codec, where, min_bytes, model)
