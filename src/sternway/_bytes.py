"""Sizes as people write and read them: ``"4GiB"``, ``"500 MB"``, a number of bytes."""

from __future__ import annotations

import re

from sternway.errors import SternwayError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str, name: str, error: type[SternwayError] = SternwayError) -> int:
    """A number of bytes from a number or from text with a unit; ``error`` says that ``name`` is neither.

    Example:
        >>> parse_bytes("1.5 KiB", "budget"), parse_bytes(7, "budget")
        (1536, 7)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].upper() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise error(f"{name} must be a size", got=repr(value), fix='pass bytes, or text such as "4GiB"')


def show_bytes(count: float) -> str:
    """A size for people to read.

    Example:
        >>> show_bytes(1536), show_bytes(12)
        ('1.5 KiB', '12 B')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(count) >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {units[power]}" if power else f"{count:.0f} B"
