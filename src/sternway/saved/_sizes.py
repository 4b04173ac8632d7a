"""Sizes as people write them: ``"4GiB"``, ``"500 MB"``, a number of bytes."""

from __future__ import annotations

import re

from sternway.errors import SavedError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """A number of bytes from a number or from text with a unit.

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
    raise SavedError(f"{name} is a size", got=repr(value), fix='pass bytes, or text such as "4GiB"')


def show_bytes(count: float) -> str:
    """A size for people to read.

    Example:
        >>> show_bytes(1536), show_bytes(12)
        ('1.5 KiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: GiB ends the loop")
