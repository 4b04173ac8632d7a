"""Where to start reading: commands and the public surface first, then by importance; scripts and tests last."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from sternway.atlas._records import Facts
from sternway.atlas.relate._context import Relations

_ASIDE = re.compile(
    r"(^|/)(tests?|testing|benchmarks?|bench|scripts?|tools?|examples?|demos?|docs?|tutorials?|_internal|vendor|third_party)"
    r"(/|$)|(^|/)(test_[^/]*|[^/]*_test|conftest|setup)\.py$"
)

PARSED = ("ast", "tree-sitter", "ctags")


def reading_order(whole: Relations, facts: Mapping[str, Facts]) -> list[str]:
    """Every file, in an order to read them."""
    place = {path: number for number, path in enumerate(whole.order)}
    languages = Counter(known.language for known in facts.values() if known.parser in PARSED)
    main = languages.most_common(1)[0][0] if languages else ""

    def rank(path: str) -> tuple[int, int, int]:
        room = _room(path, whole, facts)
        return (
            room if facts[path].language == main else max(room, 4),
            path.count("/") if path.endswith("__init__.py") else 0,
            place[path],
        )

    return sorted(whole.order, key=rank)


def _room(path: str, whole: Relations, facts: Mapping[str, Facts]) -> int:
    """0: commands, scripts at the top; 1: packages; 2: public modules; 3: private; 4: scripts; 5: tests, examples."""
    known, why = facts[path], whole.entries.get(path, "")
    if _ASIDE.search(path):
        return 5
    name = path.rpartition("/")[2]
    if why.startswith(("the command", "a package's")) or (why and name == path and not name.startswith("_")):
        return 0
    if known.parser not in PARSED or why:
        return 4
    parts = path.split("/")
    private = any(part.startswith("_") and part != "__init__.py" for part in parts)
    if parts[-1] == "__init__.py":
        return 3 if private or not (known.doc or known.exports or known.imports) else 1
    return 3 if private else 2
