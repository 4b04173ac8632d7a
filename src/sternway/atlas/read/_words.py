"""The words of a text, without common ones such as "the"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sternway.atlas._records import Keyword

_WORD = re.compile(r"(?<![\w.@/\\-])[^\W\d_]{3,}(?![\w@/\\]|\.\w)")
_TEXT = """
about above across after again against all almost along already also although always among and any are around back
became because become been before being below between both but came can cannot cause come could did does doing done
down during each either else enough etc even ever every few first for from further gave get gets getting give given
gives goes going got had has have having hence her here hers him his how however into its itself just keep kept know
last least less let like likely made make makes making many may maybe mean means might more most much must need needs
neither never next nor not nothing now off often once one ones only other others otherwise our ours out over own per
perhaps please put quite rather really same see seen several shall she should since some something still such take
taken than that the their theirs them then there therefore these they thing things this those though three through
thus together too took toward two under unless until upon use used uses using usually various very via want was way
well were what whatever when where whether which while who whole whom whose why will with within without would yes yet
you your yours
"""
STOP_WORDS = frozenset(_TEXT.split())


class WordIndex:
    """Collects words and the lines they are on."""

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = {}

    def add(self, text: str, line: int) -> None:
        """Add the words of a text whose first line is ``line``.

        Example:
            >>> words = WordIndex()
            >>> words.add("The gradient\\nof a Gradient", 5)
            >>> words.keywords()
            [Keyword(name='gradient', kind='word', line=0, uses=(5, 6))]
        """
        for number, row in enumerate(text.split("\n"), line):
            for word in _WORD.findall(row):
                word = word.lower()
                if word not in STOP_WORDS:
                    self._lines.setdefault(word, set()).add(number)

    def keywords(
        self, names: Mapping[str, Iterable[int]] | None = None, kinds: Mapping[str, tuple[str, int]] | None = None
    ) -> list[Keyword]:
        """The words in order, and identifiers among them. A word that is also an identifier is one keyword.

        Args:
            names: the lines of each identifier.
            kinds: the kind and the defining line of those that the file defines.
        """
        found = {word: Keyword(word, "word", 0, tuple(sorted(lines))) for word, lines in self._lines.items()}
        for name, lines in (names or {}).items():
            kind, line = (kinds or {}).get(name, ("name", 0))
            found[name] = Keyword(name, kind, line, tuple(sorted({*lines, *self._lines.get(name, ())} - {line})))
        return sorted(found.values(), key=lambda word: (word.name.casefold(), word.name))
