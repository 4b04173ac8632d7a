"""The search index: one small script for each pair of first letters of a name, or of a part of a name.

A page opened from disk cannot fetch files, but it can load scripts. So a search loads the one script for its first two
letters, however large the tree is.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict

from sternway.atlas._paths import shown
from sternway.atlas.pages._index import Entry
from sternway.atlas.pages._links import page_of

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_PLACES = 6  # of one name in the index; the rest are counted
_FIRST = {"class": 0, "struct": 0, "function": 1, "method": 2}
_CHARACTERS = re.compile(r"[a-z0-9]")


def shards(entries: list[Entry], paths: list[str]) -> dict[str, str]:
    """File name → script. ``files.js`` has the paths and their pages; the others refer to them by number."""
    number = {path: index for index, path in enumerate(paths)}
    rows: dict[str, list[list[object]]] = defaultdict(list)
    for entry in entries:
        places = sorted(entry.defined or entry.used, key=lambda place: (_FIRST.get(place[2], 9), place))[:_PLACES]
        count = len(entry.defined) + len(entry.used)
        row: list[object] = [entry.name, count, [[number[path], line, kind] for path, line, kind in places]]
        for key in keys(entry.name):
            rows[key].append(row)
    made = {f"{key}.js": _script("shard", key, rows[key]) for key in sorted(rows)}
    files = [[shown(path), page_of("docs", path, ".html")] for path in paths]
    made["files.js"] = _script("files", sorted(rows), files)
    return made


def keys(name: str) -> list[str]:
    """The shards that a name is in: by its start and by the starts of its parts.

    Example:
        >>> keys("_DataLoader")
        ['da', 'lo']
    """
    starts = [name.lstrip("_"), *_PARTS.findall(name)]
    found = [key for start in starts if (key := _key(start))]
    return list(dict.fromkeys(found or ["other"]))


def _key(text: str) -> str:
    key = text[:2].lower()
    return "".join(char if _CHARACTERS.match(char) else f"-{ord(char):x}-" for char in key) if len(key) == 2 else ""


def _script(function: str, *arguments: object) -> str:
    values = ",".join(json.dumps(value, ensure_ascii=True, separators=(",", ":")) for value in arguments)
    return f"atlas.{function}({values});\n".replace("</", "<\\/")
