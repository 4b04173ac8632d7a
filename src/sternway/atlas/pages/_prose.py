"""The text of docstrings and comments, in Markdown or reStructuredText, as blocks.

One reader for both: where they differ (a role, a fence, a directive) the marks do too. What is not known is shown as it
stands.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping

from sternway.atlas.pages._blocks import (
    Block,
    Code,
    Emphasis,
    Fence,
    Inline,
    Items,
    Note,
    Paragraph,
    Ref,
    Strong,
    Url,
    Words,
)
from sternway.atlas.relate._resolve import Symbol

Names = Mapping[str, Symbol]  # what mentioned names mean

_INLINE = re.compile(
    r"``(?P<double>[^`]+?)``"
    r"|:(?:[\w-]+:)?(?P<role>[\w-]+):`(?P<roled>[^`]+)`"
    r"|`(?P<title>[^`<>]+?)\s*<(?P<url>https?://[^\s<>`]+)>`__?"
    r"|`(?P<single>[^`\n]+)`_{0,2}"
    r"|\[(?P<text>[^\]\[\n]+)\]\((?P<href>https?://[^\s()]+)\)"
    r"|(?P<bare>https?://[^\s<>()\[\]`'\"]+[^\s<>()\[\]`'\".,;:!?])"
    r"|\*\*(?P<bold>[^*\n]+)\*\*"
    r"|(?<![\w*\\])\*(?P<italic>[^\s*][^*\n]*[^\s*]|[^\s*])\*(?![\w*])"
)
_BULLET = re.compile(r"(\s*)([-*+•]|\(?\d{1,2}[.)])\s+(?=\S)")
_DIRECTIVE = re.compile(r"\s*\.\.\s+([\w:-]+)::\s*(.*)$")
_UNDERLINE = re.compile(r"\s*([=\-~^#*\"'+])\1{2,}\s*$")
_DRAWN = re.compile(r"\s*(\+[-=+]{3,}|={3,}(\s+={2,})+|\|.*\|\s*$)")
_NOTE_WORDS = """
note warning warn seealso tip important hint caution danger attention error deprecated versionadded versionchanged
admonition todo rubric
"""
_CODE_WORDS = "code code-block sourcecode testcode doctest testsetup testoutput math parsed-literal"
_SKIPPED_WORDS = "include image figure toctree index autosummary automodule currentmodule plot"
_NOTES = frozenset(_NOTE_WORDS.split())
_CODE = frozenset(_CODE_WORDS.split())
_SKIPPED = frozenset(_SKIPPED_WORDS.split())


def prose(text: str, names: Names | None = None) -> Words:
    """A run of words: code, links and bold are marked, names that are known lead to their definition.

    Example:
        >>> prose("Calls ``run`` **once**.")
        ('Calls ', Code(text='run', anchor=''), ' ', Strong(text='once'), '.')
    """
    words: list[Inline] = []
    end = 0
    for match in _INLINE.finditer(text):
        words += [text[end : match.start()], _inline(match, names or {})]
        end = match.end()
    return tuple(word for word in (*words, text[end:]) if word)


def _inline(match: re.Match[str], names: Names) -> Inline:
    if match["url"]:
        return Url(match["url"], match["title"].strip())
    if match["href"]:
        return Url(match["href"], match["text"])
    if match["bare"]:
        return Url(match["bare"], match["bare"])
    if match["bold"]:
        return Strong(match["bold"])
    if match["italic"]:
        return Emphasis(match["italic"])
    text = match["double"] or match["single"] or match["roled"]
    if match["roled"]:
        said = re.match(r"(.+?)\s*<([^<>]+)>$", text)
        text = said[2] if said else text
        label = said[1] if said else text.rpartition(".")[2] if text.startswith("~") else text
        return named(text.lstrip("~!"), names, label.lstrip("~!"))
    return named(text, names)


def named(text: str, names: Names, label: str = "") -> Inline:
    """A name as code, linked to its definition if that is known."""
    symbol = names.get(text.removesuffix("()"))
    if symbol is None:
        return Code(label or text)
    return Ref(label or text, symbol.path, symbol.name, symbol.line)


def read(text: str, names: Names | None = None) -> list[Block]:
    """The blocks of a text."""
    return _Reader(text, names or {}).blocks()


class _Reader:
    def __init__(self, text: str, names: Names) -> None:
        self.lines = text.expandtabs(4).split("\n")
        self.names = names
        self.at = 0
        self.found: list[Block] = []
        self.words: list[str] = []
        self.items: list[Words] = []
        self.ordered = False

    def blocks(self) -> list[Block]:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            for rule in _RULES:
                if rule(self, line):
                    break
            else:
                self.words.append(line.strip())
                self.at += 1
        self.flush()
        return self.found

    def flush(self) -> None:
        """End the paragraph and the list."""
        self.paragraph()
        if self.items:
            self.found.append(Items(tuple(self.items), self.ordered))
            self.items = []

    def paragraph(self) -> None:
        if self.words:
            words = prose(" ".join(self.words), self.names)
            self.words = []
            if self.items:
                self.flush()
            self.found.append(Paragraph(words))

    def add(self, block: Block) -> bool:
        self.flush()
        self.found.append(block)
        return True

    def indented(self, above: int) -> str:
        """The following lines that are indented more than ``above``, without their indentation."""
        start = self.at
        while self.at < len(self.lines) and (not self.lines[self.at].strip() or _indent(self.lines[self.at]) > above):
            self.at += 1
        return textwrap.dedent("\n".join(self.lines[start : self.at])).strip("\n").rstrip()

    def until_blank(self) -> str:
        start = self.at
        while self.at < len(self.lines) and self.lines[self.at].strip():
            self.at += 1
        return textwrap.dedent("\n".join(self.lines[start : self.at]))

    # -- rules: each says whether it took the line

    def blank(self, line: str) -> bool:
        if line.strip():
            return False
        self.paragraph()
        self.at += 1
        return True

    def fence(self, line: str) -> bool:
        match = re.match(r"\s*(```+|~~~+)\s*([\w+-]*)", line)
        if not match:
            return False
        start = self.at + 1
        end = next((at for at in range(start, len(self.lines)) if self.lines[at].strip().startswith(match[1])), None)
        if end is None:
            return False
        self.at = end + 1
        return self.add(Fence(textwrap.dedent("\n".join(self.lines[start:end])), match[2]))

    def doctest(self, line: str) -> bool:
        return line.lstrip().startswith(">>> ") and self.add(Fence(self.until_blank(), "python"))

    def directive(self, line: str) -> bool:
        match = _DIRECTIVE.match(line)
        if not match:
            if cited := re.match(r"\s*\.\. (\[[^\]]+\])\s*(.*)", line):
                self.at += 1
                said = f"{cited[2]} {self.indented(_indent(line))}"
                return self.add(Paragraph((f"{cited[1]} ", *prose(" ".join(said.split()), self.names))))
            if re.match(r"\s*\.\. ", line):  # a comment or a target, which is not for readers
                self.at += 1
                self.indented(_indent(line))
                return True
            return False
        self.at += 1
        goes_on = self.at < len(self.lines) and bool(self.lines[self.at].strip())
        body = self.indented(_indent(line))
        name, more = match[1].lower(), match[2].strip()
        if name in _SKIPPED:
            return True
        if name in _CODE:
            options = re.match(r"(?:\s*:[\w-]+:[^\n]*\n)+", body + "\n")
            lexer = "" if name == "math" else more or "python"
            code = body[options.end() :].strip("\n") if options else body
            return self.add(Fence("\n".join(filter(None, ((more if name == "math" else ""), code))), lexer))
        if name in _NOTES:
            inside = ("\n" if goes_on else "\n\n").join(filter(None, (more, body)))
            return self.add(Note(name.capitalize(), tuple(read(inside, self.names)))) if inside else True
        return self.add(Paragraph(prose(" ".join((more, body)).strip(), self.names))) if more or body else True

    def drawn(self, line: str) -> bool:
        return bool(_DRAWN.match(line)) and self.add(Fence(self.until_blank()))

    def heading(self, line: str) -> bool:
        match = re.match(r"#{1,6}\s+(.+)", line)
        following = self.lines[self.at + 1] if self.at + 1 < len(self.lines) else ""
        below = self.lines[self.at + 2] if self.at + 2 < len(self.lines) else ""
        if _UNDERLINE.match(line) and line.strip() == below.strip() and following.strip():
            self.at += 3
            return self.add(Paragraph((_title(following.strip()),)))
        if match:
            self.at += 1
            return self.add(Paragraph((_title(match[1]),)))
        if _UNDERLINE.match(following) and not self.words and len(following.strip()) >= len(line.strip()) - 2:
            self.at += 2
            return self.add(Paragraph((_title(line.strip()),)))
        return False

    def literal(self, line: str) -> bool:
        """``Example::`` and the indented text below."""
        if not line.rstrip().endswith("::"):
            return False
        after = next((row for row in self.lines[self.at + 1 :] if row.strip()), "")
        if _indent(after) <= _indent(line):
            return False
        said = line.strip().removesuffix("::").rstrip()
        if said:
            self.words.append(f"{said}:")
        self.at += 1
        body = self.indented(_indent(line))
        return self.add(Fence(body, "python" if ">>>" in body or "import " in body else ""))

    def bullet(self, line: str) -> bool:
        match = _BULLET.match(line)
        if not match or (self.words and not self.items and not self.words[-1].endswith(":")):
            return False  # a dash or a number inside a paragraph; a list may follow a colon without an empty line
        self.paragraph()
        ordered = match[2][-1] in ".)"
        if ordered != self.ordered:
            self.flush()
        self.ordered = ordered
        indent = len(match[0])
        parts = [line[match.end() :].strip()]
        self.at += 1
        while self.at < len(self.lines) and (row := self.lines[self.at]).strip():
            if _BULLET.match(row) or _indent(row) < min(indent, len(match[1]) + 2):
                break
            parts.append(row.strip())
            self.at += 1
        self.items.append(prose(" ".join(parts), self.names))
        return True

    def explained(self, line: str) -> bool:
        """Indented text below a line that ends with a colon."""
        before = self.lines[self.at - 1] if self.at else ""
        if not self.words or not before.rstrip().endswith(":") or _indent(line) <= _indent(before):
            return False
        self.flush()
        self.found += read(self.indented(_indent(before)), self.names)
        return True

    def indented_text(self, line: str) -> bool:
        """A picture or a piece of code that nothing introduces."""
        if _indent(line) < 4 or self.words or self.items:
            return False
        return self.add(Fence(self.indented(3)))


def _title(text: str) -> Strong:
    """A heading, without the marks inside it."""
    return Strong("".join(word if isinstance(word, str) else word.text for word in prose(text)))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_RULES: tuple[Callable[[_Reader, str], bool], ...] = (
    _Reader.blank,
    _Reader.fence,
    _Reader.doctest,
    _Reader.directive,
    _Reader.drawn,
    _Reader.heading,
    _Reader.literal,
    _Reader.bullet,
    _Reader.explained,
    _Reader.indented_text,
)
