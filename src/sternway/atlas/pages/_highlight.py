"""Highlighted source as HTML lines: Python by our own lexer, other languages by pygments."""

from __future__ import annotations

import contextlib
from html import escape

from pygments.lexers import get_lexer_by_name

from sternway.atlas.python._lexer import tokens
from sternway.atlas.read._text import lines_of

# Short tags instead of spans with classes: half of a source page would be marks otherwise.
TAGS = {"c": "em", "s": "samp", "k": "b", "m": "var", "n": "cite", "p": "cite"}
PLAIN_ABOVE = 400_000  # characters, for languages other than Python; highlighting a longer file takes seconds


def highlight(text: str, lexer: str) -> list[str]:
    """One piece of HTML for each line."""
    if lexer == "python":
        return _python(text)
    if lexer and len(text) <= PLAIN_ABOVE:
        with contextlib.suppress(Exception):  # an unknown lexer, or one that fails: the text is shown plain
            return _pygments(text, lexer)
    return [escape(line) for line in lines_of(text)]


def _python(text: str) -> list[str]:
    text = escape(text, quote=False)  # first and at once: what it writes has neither quotes nor hashes nor keywords
    parts: list[str] = []
    before = 0
    for kind, start, end in tokens(text):
        tag = TAGS[kind]
        body = f"<{tag}>{text[start:end]}</{tag}>"
        parts += (text[before:start], body.replace("\n", f"</{tag}>\n<{tag}>") if "\n" in body else body)
        before = end
    return lines_of("".join([*parts, text[before:]]))


def _pygments(text: str, lexer: str) -> list[str]:
    found = get_lexer_by_name(lexer, stripnl=False, ensurenl=False)
    pieces: list[str] = []
    for kind, value in found.get_tokens(text):
        mark = _class(kind)
        body = escape(value, quote=False)
        if mark and value.strip():
            tag = TAGS[mark]
            body = f"<{tag}>{body}</{tag}>".replace("\n", f"</{tag}>\n<{tag}>")
        pieces.append(body)
    return lines_of("".join(pieces))


def _class(kind: object) -> str:
    """The CSS class for a kind of pygments' tokens."""
    name = str(kind).removeprefix("Token.")
    for start, mark in _CLASSES:
        if name.startswith(start):
            return mark
    return ""


_CLASSES = (
    ("Comment.Preproc", "p"),
    ("Comment", "c"),
    ("Literal.String", "s"),
    ("Literal.Number", "m"),
    ("Keyword", "k"),
    ("Name.Decorator", "n"),
    ("Name.Tag", "k"),
    ("Name.Attribute", "n"),
    ("Generic.Heading", "k"),
    ("Generic.Subheading", "k"),
)
