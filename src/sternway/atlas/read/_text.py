"""A file's bytes as text, and the encoding they were decoded with."""

from __future__ import annotations

import codecs
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

LARGEST = 5 << 20  # bytes; above this a file is described, not shown
_COOKIE = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*#[^\n]*?coding[:=][ \t]*([-\w.]+)")
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


_CONTROL = bytes(byte for byte in range(32) if byte not in (7, 8, 9, 10, 11, 12, 13, 27))


class Text(NamedTuple):
    """A file's text; ``problem`` is empty where all of it was read as UTF-8."""

    text: str
    encoding: str
    digest: str
    size: int
    problem: str = ""


def read(path: Path, *, is_python: bool = False) -> Text:
    """Read a file that is small enough. Raises OSError as reading does."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    encoding, problem = "UTF-8", ""
    marked = next((name for bom, name in _BOMS if data.startswith(bom)), "")
    cookie = _COOKIE.match(data) if is_python else None
    try:
        if marked:
            text, encoding = data.decode(marked), f"{marked.upper()} by its byte order mark"
        elif cookie and codecs.lookup(cookie[1].decode()).name not in ("utf-8", "ascii"):
            text, encoding = data.decode(cookie[1].decode()), f"{cookie[1].decode()} as its first lines say"
        else:
            text = data.decode("utf-8")
    except (UnicodeDecodeError, LookupError):
        text, encoding = data.decode("latin-1"), "unknown, shown as Latin-1"
        problem = "not in UTF-8; shown as Latin-1"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Text(text, encoding, digest, len(data), problem)


def is_binary(start: bytes) -> bool:
    """Whether a file's first bytes are not text in any encoding that we read."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return False
    if b"\0" in start:
        return True
    plain = start.translate(None, _CONTROL)
    return len(start) - len(plain) > len(start) // 10


def lines_of(text: str) -> list[str]:
    """Lines as the parsers count them: split at "\\n" only, without an empty last line."""
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines
