"""The search index, as scripts: a page opened from disk cannot fetch files, but it can load scripts.

``names.js`` has every file and every definition with a line of context, and is loaded with the first search. The words
of docstrings, and uses of names, are in one script for each pair of first letters, loaded when they are asked for.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sternway.atlas._paths import file_page, shown
from sternway.atlas._records import Definition, Facts, Keyword
from sternway.atlas.python._docstrings import first_paragraph
from sternway.atlas.read._text import lines_of
from sternway.atlas.read._words import WordIndex

_CONTEXT = 90  # characters
_PLACES = 3  # of one name's uses
_DOCUMENTS = 40  # definitions whose docstring has one word
_KINDS = {"class": "c", "struct": "c", "interface": "c", "enum": "c", "function": "f", "method": "m", "variable": "v"}


class SearchSource(NamedTuple):
    """What one file gives to the search index."""

    path: str
    facts: Facts
    keywords: list[Keyword]
    text: str


class _Use(NamedTuple):
    files: int
    places: list[tuple[int, int]]
    context: str


def shards(sources: Iterable[SearchSource]) -> dict[str, str]:
    """File name → script."""
    files: list[list[str]] = []
    names: list[tuple[str, str, int, int, str]] = []  # name, kind, file, line, context
    documents: dict[str, dict[int, None]] = defaultdict(dict)
    uses: dict[str, _Use] = {}
    for number, (path, facts, keywords, text) in enumerate(sources):
        files.append([shown(path), _page(path), _cut(facts.purpose)])
        for item in facts.definitions:
            for word in _words(item.doc) if item.doc else ():
                documents[word].setdefault(len(names))
            names.append((item.name, _KINDS.get(item.kind, "o"), number, item.line, _context(item)))
        for word in _words(facts.doc):
            documents[word].setdefault(-1 - number)
        lines = lines_of(text)
        for keyword in keywords:
            at = keyword.uses[0] if keyword.uses else keyword.line
            before = uses.get(keyword.name)
            if before is None:
                uses[keyword.name] = _Use(1, [(number, at)], _cut(lines[at - 1], 60) if at <= len(lines) else "")
            else:
                if len(before.places) < _PLACES:
                    before.places.append((number, at))
                uses[keyword.name] = before._replace(files=before.files + 1)
    rows = _rows(documents, uses)
    made = {f"{key}.js": _script("shard", key, found) for key, found in sorted(rows.items())}
    made["names.js"] = _script("names", sorted(rows), files, *_columns(names))
    return made


def _page(path: str) -> str:
    """The page's path where it differs from the file's own."""
    page = file_page(path, "")
    return page if page != shown(path) else ""


def _columns(names: Sequence[tuple[str, str, int, int, str]]) -> list[object]:
    """Columns are smaller than rows, and a browser reads them faster."""
    return [
        "\n".join(row[0] for row in names),
        "".join(row[1] for row in names),
        [row[2] for row in names],
        [row[3] for row in names],
        "\n".join(row[4] for row in names),
    ]


def _rows(documents: Mapping[str, dict[int, None]], uses: Mapping[str, _Use]) -> dict[str, list[list[object]]]:
    rows: dict[str, list[list[object]]] = defaultdict(list)
    for word in sorted({*documents, *uses}):
        found = list(documents.get(word, ()))
        use = uses.get(word)
        places = [value for place in use.places for value in place] if use else []
        row: list[object] = [word, found[:_DOCUMENTS], use.files if use else 0, places, use.context if use else ""]
        rows[_key(word)].append(row)
    return rows


def _words(text: str) -> list[str]:
    words = WordIndex()
    words.add(text, 1)
    return [word.name for word in words.keywords()]


def _context(item: Definition) -> str:
    """The docstring's first sentence, or the signature."""
    said = first_paragraph(item.doc)
    return _cut(re.split(r"(?<=[.!?])\s", said)[0]) if said else _cut(item.signature or item.value)


def _cut(text: str, longest: int = _CONTEXT) -> str:
    text = " ".join(text.replace("`", "").split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _key(word: str) -> str:
    """The shard of a word: its first two characters, without leading underscores."""
    plain = word.lstrip("_").lower()[:2]
    return "".join(char if re.match(r"[a-z0-9]", char) else f"-{ord(char):x}-" for char in plain) or "other"


def _script(function: str, *arguments: object) -> str:
    values = ",".join(json.dumps(value, ensure_ascii=True, separators=(",", ":")) for value in arguments)
    return f"atlas.{function}({values});\n".replace("</", "<\\/")
