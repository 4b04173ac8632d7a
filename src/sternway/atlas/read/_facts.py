"""The facts of one file, from the parser for its language; where that fails, its words and the reason."""

from __future__ import annotations

import re

from sternway.atlas._records import Facts, Keyword
from sternway.atlas.python._facts import read_python
from sternway.atlas.read import _ctags
from sternway.atlas.read._keys import read_keys
from sternway.atlas.read._languages import Language
from sternway.atlas.read._sitter import read_parsed
from sternway.atlas.read._words import WordIndex

_OPENING = 3000  # characters of a text file that its page may show


def read_facts(
    text: str, language: Language, module: str, package: str, records: list[dict[str, object]] | None
) -> tuple[Facts, list[Keyword]]:
    """Facts and keywords of a text. ``records``: ctags' records of this file, None if ctags was not run."""
    problem = ""
    try:
        if language.parser == "ast":
            return read_python(text, module, package)
        if language.parser == "tree-sitter":
            return read_parsed(text, language.name)
        if language.parser == "keys":
            return read_keys(text, language.name)
    except SyntaxError as error:
        problem = f"Python cannot parse line {error.lineno or 0}: {error.msg}"
    except Exception as error:  # no file may stop the run: its words are listed
        problem = f"cannot be parsed: {str(error).partition(chr(10))[0] or type(error).__name__}"
    if language.parser == "ctags":
        if records is not None:
            return _ctags.read_tagged(text, language.name, records)
        problem = _ctags.MISSING
    words = WordIndex()
    words.add(text, 1)
    purpose, line = _first_prose(text) if language.name in ("Markdown", "reStructuredText", "text") else ("", 0)
    doc = _opening(text) if language.name in ("Markdown", "reStructuredText") else purpose
    return Facts(language.name, "words", problem, purpose, line, doc), words.keywords()


def _opening(text: str) -> str:
    """The first paragraphs of a text, up to its second heading."""
    parts: list[str] = []
    for part in re.split(r"\n{2,}", text[:_OPENING].strip()):
        heading = part.startswith("#") or re.search(r"\n[=-]{3,}\s*\Z", part)
        if (heading and parts) or part.count("```") % 2:
            break
        parts.append(part)
    return "\n\n".join(parts)


def _first_prose(text: str) -> tuple[str, int]:
    """The first heading or line of a text."""
    for number, row in enumerate(text[:20000].split("\n"), 1):
        plain = re.sub(r"^[#=\-*\s>]+", "", row).strip()
        if len(plain) > 2 and not plain.startswith(("<", "[", "!")):
            return plain[:300], number
    return "", 0
