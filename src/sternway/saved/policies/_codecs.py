"""Codecs for saved tensors: bytes an element, and the largest error.

| codec | for | bytes per element | error |
| --- | --- | --- | --- |
| bf16 | float32, float64 | 2 | ≤ 2⁻⁸ · |x| |
| fp8 | floats | 1 + 4/256 | ≤ max(|x| / 16, absmax / 212992) |
| int8 | floats | 1 + 4/256 | ≤ absmax / 250 |
| bits | bool; two values | 1/8 | none |

``absmax`` is the largest finite magnitude in the element's block of 256. Infinities and NaN come back as they were. The
errors are before rounding to the tensor's own dtype, if that has fewer digits, and for numbers that bfloat16 (bf16) or
float32 holds in full precision: larger ones come back as infinities, smaller ones as other small numbers. Signs are
kept, and zero is the only zero. Integers are never encoded: a backward may use them as indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

BLOCK = 256


class Codec(ABC):
    """Encodes a flat tensor as flat bytes and back."""

    name: str

    @abstractmethod
    def suits(self, tensor: Tensor) -> bool:
        """Whether the tensor may be encoded, and gets smaller."""

    @abstractmethod
    def encode(self, flat: Tensor) -> Tensor:
        """Bytes for a flat tensor."""

    @abstractmethod
    def decode(self, payload: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The flat tensor, of ``nbytes`` and ``dtype``."""


_SMALLEST = 2.0**-126
"""The smallest scale of a block."""
_TINY = 2.0**-17  # of 126: about a thousandth of a step
_FP8_SMALLEST = 2.0**-9


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype of less range, where a number too small for it becomes the smallest that there is."""
    narrow = tensor.to(dtype)
    lost = torch.logical_and(tensor, narrow == 0)
    narrow.view(torch.int16 if dtype.itemsize == 2 else torch.int32).bitwise_or_(lost)  # ±0 with the lowest bit set
    return narrow


class Bf16(Codec):
    """Rounding to bfloat16."""

    name = "bf16"

    def suits(self, tensor: Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.float64)

    def encode(self, flat: Tensor) -> Tensor:
        return _narrow(flat, torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
        return payload.view(torch.bfloat16).to(dtype)


class Blockwise(Codec):
    """One byte per element and one float32 scale per block; subclasses say what the byte is.

    A number that is not zero never becomes zero, however small: whether it is, and its sign, decide what the backward
    of a ReLU lets through.
    """

    limit: float
    """What the largest finite magnitude of a block is scaled to."""

    def suits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > 1

    def encode(self, flat: Tensor) -> Tensor:
        count = flat.numel()
        blocks = -(-count // BLOCK)
        rows = flat if count == blocks * BLOCK else torch.nn.functional.pad(flat, (0, blocks * BLOCK - count))
        rows = rows.view(blocks, BLOCK)
        rows = _narrow(rows, torch.float32) if rows.dtype == torch.float64 else rows.to(torch.float32)
        size = rows.abs().amax(1, keepdim=True)
        if rows.is_cuda or not bool(size.isfinite().all()):  # asking would make the CPU wait for a GPU
            size = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(1, keepdim=True)
        payload = torch.empty(blocks * (BLOCK + 4), dtype=torch.uint8, device=flat.device)
        scale = payload[: 4 * blocks].view(torch.float32).view(blocks, 1)
        scale.copy_(torch.where(size > 0, (size / self.limit).clamp_min(_SMALLEST), 0.0))
        # A block of nothing but zeros has scale 0. Where 1 / scale overflows, all numbers are too small for a code.
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        inverse = torch.where(inverse.isfinite(), inverse, 0.0)
        self._write(torch.mul(rows, inverse), rows, payload[4 * blocks :].view(blocks, BLOCK))
        return payload

    def decode(self, payload: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
        blocks = payload.numel() // (BLOCK + 4)
        scale = payload[: 4 * blocks].view(torch.float32).view(blocks, 1)
        rows = self._read(payload[4 * blocks :].view(blocks, BLOCK), scale)
        return rows.view(-1).to(dtype)[: nbytes // dtype.itemsize]

    @abstractmethod
    def _write(self, scaled: Tensor, rows: Tensor, codes: Tensor) -> None: ...

    @abstractmethod
    def _read(self, codes: Tensor, scale: Tensor) -> Tensor: ...


class Int8(Blockwise):
    """Codes -125 … 125 for finite numbers, ±126 for those that round to zero, ±127 for the infinities, -128 for NaN."""

    name = "int8"
    limit = 125.0

    def _write(self, scaled: Tensor, rows: Tensor, codes: Tensor) -> None:
        scaled = scaled.round_().clamp_(-125, 125)
        tiny = (scaled == 0) & (rows != 0)
        scaled = torch.where(tiny, torch.copysign(torch.full_like(rows, 126), rows), scaled)
        scaled.masked_fill_(rows == torch.inf, 127).masked_fill_(rows == -torch.inf, -127)
        codes.view(torch.int8).copy_(scaled.masked_fill_(rows.isnan(), -128))

    def _read(self, codes: Tensor, scale: Tensor) -> Tensor:
        levels = codes.view(torch.int8).to(torch.float32)
        rows = torch.where(levels.abs() == 126, levels * _TINY, levels) * scale
        rows.masked_fill_(levels == 127, torch.inf).masked_fill_(levels == -127, -torch.inf)
        return rows.masked_fill_(levels == -128, torch.nan)


class Fp8(Blockwise):
    """float8_e4m3fn: finite numbers up to 416, ±448 for the infinities, and its own NaN."""

    name = "fp8"
    limit = 416.0

    def _write(self, scaled: Tensor, rows: Tensor, codes: Tensor) -> None:
        scaled = scaled.clamp_(-416, 416)
        tiny = (scaled.abs() < _FP8_SMALLEST) & (rows != 0)
        scaled = torch.where(tiny, torch.copysign(torch.full_like(rows, _FP8_SMALLEST), rows), scaled)
        scaled.masked_fill_(rows == torch.inf, 448).masked_fill_(rows == -torch.inf, -448)
        codes.view(torch.float8_e4m3fn).copy_(scaled.masked_fill_(rows.isnan(), torch.nan))

    def _read(self, codes: Tensor, scale: Tensor) -> Tensor:
        levels = codes.view(torch.float8_e4m3fn).to(torch.float32)
        rows = levels * scale
        return rows.masked_fill_(levels == 448, torch.inf).masked_fill_(levels == -448, -torch.inf)


class Bits(Codec):
    """One bit per element, exactly: for booleans, and for numbers that take one value besides zero, as dropout's do."""

    name = "bits"

    def suits(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.bool or self._is_mask(tensor)

    def _is_mask(self, tensor: Tensor) -> bool:
        """Zero and one other value. Only looked for on the CPU: on a GPU dropout saves booleans, and asking waits."""
        if not tensor.is_floating_point() or tensor.device.type != "cpu" or tensor.numel() < 64:
            return False
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        first = flat[:64]
        if not bool((first == 0).any()) or bool(((first != 0) & (first != first.max())).any()):  # nearly always enough
            return False
        value = flat.abs().max()
        return bool(((flat == 0) | (flat == value)).all()) and not bool(torch.signbit(flat).any())

    def encode(self, flat: Tensor) -> Tensor:
        value = flat.max().view(1) if flat.dtype != torch.bool else flat.new_ones(1)
        head = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        head[: flat.element_size()] = value.view(torch.uint8)
        mask = (flat != 0).to(torch.uint8)
        if mask.numel() % 8:
            mask = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flat.device)
        return torch.cat([head, (mask.view(-1, 8) * weights).sum(1, dtype=torch.uint8)])

    def decode(self, payload: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
        value = payload[: dtype.itemsize].clone().view(dtype)
        places = torch.arange(8, dtype=torch.uint8, device=payload.device)
        bits = ((payload[8:, None] >> places) & 1).view(-1)[: nbytes // dtype.itemsize].bool()
        return bits if dtype == torch.bool else torch.where(bits, value, torch.zeros_like(value))


BITS = Bits()
LOSSY: dict[str, Codec] = {codec.name: codec for codec in (Bf16(), Fp8(), Int8())}
