"""Docstrings: the first paragraph, and the documented exceptions, parsed by griffe."""

from __future__ import annotations

import logging
import re

from griffe import Docstring, DocstringSectionRaises, Parser

_HAS_RAISES = re.compile(r"^\s*(Raises:|Raises\s*\n\s*-{3,}|:raises?\s)", re.MULTILINE)
_STYLES = ((re.compile(r"Raises\s*\n\s*-{3,}"), Parser.numpy), (re.compile(r":raises?\s"), Parser.sphinx))


def first_paragraph(text: str) -> str:
    """The first paragraph as one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def documented_exceptions(text: str) -> tuple[str, ...]:
    """The exceptions that a docstring documents, in its own order.

    Example:
        >>> documented_exceptions("Open it.\\n\\nRaises:\\n    OSError: if it is not there.")
        ('OSError',)
    """
    if not _HAS_RAISES.search(text):
        return ()
    logging.getLogger("griffe").setLevel(logging.CRITICAL)  # do not report errors in the docstrings
    style = next((parser for pattern, parser in _STYLES if pattern.search(text)), Parser.google)
    names: dict[str, None] = {}
    for section in Docstring(text).parse(style):
        if isinstance(section, DocstringSectionRaises):
            names.update((str(item.annotation), None) for item in section.value if item.annotation)
    return tuple(names)
