"""Docstrings as text: the first paragraph, and the names that are mentioned."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MENTIONED = re.compile(r"`{1,2}~?([A-Za-z_][\w.]*)(?:\(\))?`{1,2}")


def first_paragraph(text: str) -> str:
    """The first paragraph as one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def mentioned(text: str) -> Iterator[str]:
    """The names in backquotes.

    Example:
        >>> list(mentioned("Calls ``run()`` of :class:`~torch.nn.Module`, not `a b`."))
        ['run', 'torch.nn.Module']
    """
    if "`" in text:
        yield from (name.rstrip(".") for name in _MENTIONED.findall(text))
