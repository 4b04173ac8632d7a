"""Comments and identifiers of languages that write them as C does."""

from __future__ import annotations

import re

from sternway.atlas._records import Definition, Keyword
from sternway.atlas.read._words import WordIndex

_PIECES = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|(?P<name>[A-Za-z_]\w*)",
    re.DOTALL,
)
_LICENCE = re.compile(r"(?i)copyright|licen[sc]e|spdx")


def cleaned(comment: str) -> str:
    """A comment without its marks.

    Example:
        >>> cleaned("/** Adds.\\n * Twice. */")
        'Adds.\\nTwice.'
    """
    return re.sub(r"(?m)^[ \t]*(//+[!<]*|/\*+[!<]*|\*+/|\*)[ \t]?|[ \t]*\*+/", "", comment).strip()


def first_comment(text: str) -> tuple[str, int]:
    """The comment that a file opens with, unless it is a licence; and its line."""
    for match in re.finditer(r"\s*(//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)", text[:20000], re.DOTALL):
        if text[: match.start(1)].strip() and not text[: match.start()].rstrip().endswith(("*/", "#pragma once")):
            break
        body = cleaned(match[1])
        if body and not _LICENCE.search(body):
            return body, text.count("\n", 0, match.start(1)) + 1
    return "", 0


def keywords_of(text: str, definitions: tuple[Definition, ...], *, has_comments: bool = True) -> list[Keyword]:
    """Identifiers outside strings, and the words of comments. Without C's comments, all words."""
    lines: dict[str, set[int]] = {}
    words = WordIndex()
    if has_comments:
        number, before = 1, 0
        for match in _PIECES.finditer(text):
            number += text.count("\n", before, match.start())
            before = match.start()
            if match["comment"]:
                words.add(match["comment"], number)
            elif match["name"]:
                lines.setdefault(match["name"], set()).add(number)
    else:
        words.add(text, 1)
    kinds: dict[str, tuple[str, int]] = {}
    for item in definitions:
        name = re.split(r"::|\.", item.name)[-1]
        kinds.setdefault(name, (item.kind, item.line))
        lines.setdefault(name, set()).add(item.line)
    return words.keywords(lines, kinds)
