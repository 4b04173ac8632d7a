"""What the written Markdown pages claim, read back from their text alone."""

from __future__ import annotations

import ast
import glob
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Claims = dict[str, set[tuple[object, ...]]]  # kind → (path, …)

_SECTION = re.compile(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\]\\]|\\.)*)\]\(([^)]*?)(?:#L(\d+))?\)")
_AT = re.compile(r"\[((?:[^\]\\]|\\.)*):(\d+)\]\([^)]*#L\d+\)")
_SPAN = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
_KEYWORD = re.compile(r"^- (`+) ?(.+?) ?\1(?: [a-z ]+)?((?: .*)?)$", re.MULTILINE)
_ARTICLE = re.compile(r"^#{3,4} ([a-z ]+) `([^`]+)`$", re.MULTILINE)
_DECLARED = re.compile(
    r"^(```+)python\n((?:(?!^```).)*?)\n\1\n\n\[?lines? (\d+)[^\]\n]*(?:\]\([^)]*\))?$", re.MULTILINE | re.DOTALL
)
_METHODS = ("property", "class method", "static method")


def read(out: Path, *, words: bool = True) -> Claims:
    """Every claim of every page. ``words``: of keyword pages too."""
    claims: Claims = defaultdict(set)
    for page in sorted(out.rglob("*_docs.md")):
        text = page.read_text("utf-8")
        sections = dict(_SECTION.findall(_unfolded(text) + "\n"))
        path = _code(next(row[1] for row in _rows(sections["File"]) if row[0] == "Path"))
        if "so this page is brief: " in sections["Overview"]:
            claims["brief page"].add((path,))
        _breakdown(path, sections.get("Detailed breakdown", ""), claims)
        _overview(path, sections["Overview"], claims)
        _dependencies(path, sections.get("Dependencies", ""), claims)
        _facts(path, sections, claims)
        _design(path, sections.get("Architecture and design", ""), claims)
        _usage(path, sections, claims)
        _references(path, sections.get("Cross-references", ""), claims)
        for name in _modules(sections.get("Training and backward", "")):
            claims["nn.Module subclass"].add((path, name))
        if words:
            _keywords(path, page, claims)
    return claims


def _unfolded(text: str) -> str:
    """Without the marks of folded lists; headings inside code are no headings."""
    rows, fence = [], ""
    for row in text.split("\n"):
        marks = re.match(r"```+", row)
        if marks and not fence:
            fence = marks[0]
        elif row == fence:
            fence = ""
        elif fence and row.startswith(("#", "|")):
            row = f" {row}"
        elif row.startswith(("<details>", "</details>")):
            continue
        rows.append(row)
    return "\n".join(rows)


def _keywords(path: str, page: Path, claims: Claims) -> None:
    name = page.name.replace("_docs.md", "_kw")
    for part in sorted(page.parent.glob(f"{glob.escape(name)}*.md")):
        if not re.fullmatch(rf"{re.escape(name)}(\.\d+)?\.md", part.name):
            continue
        for _, word, rest in _KEYWORD.findall(part.read_text("utf-8")):
            lines = re.sub(r"§\d+", "", re.sub(r"\]\([^)]*\)", " ", rest))
            claims["identifier or word"].update((path, word, int(line)) for line in re.findall(r"\d+", lines))


def _rows(text: str) -> Iterator[list[str]]:
    for row in text.split("\n"):
        if row.startswith("| ") and not row.startswith("| --- |"):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r" \|(?: |$)", row[1:])[:-1]]


def _tables(text: str) -> Iterator[dict[str, str]]:
    """Rows by the names of their columns."""
    for part in re.split(r"\n{2,}", text):
        rows = list(_rows(part))
        for row in rows[1:]:
            yield dict(zip(rows[0], row, strict=True))


def _code(cell: str) -> str:
    match = _SPAN.search(cell)
    return match[2] if match else ""


def _line(cell: str) -> int:
    lines = [int(line) for line in re.findall(r"\blines? (\d+)", cell)]
    return lines[-1] if lines else 0


def _places(cell: str, path: str) -> Iterator[tuple[str, int]]:
    """Lines of files, in a list: ``other.py:12``, ``13`` in the same file, ``line 14`` of the page's own."""
    by = path
    for label in re.sub(r"\[((?:[^\]\\]|\\.)*)\]\([^)]*\)", r"\1", cell).split(", "):
        if match := re.match(r"(?:(.*):|line )?(\d+)(?= |$)", label):
            by = _unescaped(match[1]) if match[1] else path if label.startswith("line ") else by
            yield by, int(match[2])


def _unescaped(text: str) -> str:
    return re.sub(r"\\([\\`*_\[\]<>|&~#])", r"\1", text)


def _plain(text: str) -> str:
    """Words without marks, for comparison."""
    return re.sub(r"[`\s]+", " ", _unescaped(text)).strip()


def tail(text: str) -> str:
    """The last part of a dotted name, without what is in brackets."""
    return " ".join(text.split()).partition("[")[0].rpartition(".")[2]


def signature(text: str) -> str:
    """A signature as parsed, so that spelling does not count."""
    return ast.dump(ast.parse(f"def f{text}: pass").body[0])


def _breakdown(path: str, text: str, claims: Claims) -> None:
    """Articles: a heading, then one signature or several. Tables: everything else."""
    articles = list(_ARTICLE.finditer(text))
    owner = ""  # the class that the article is about, or whose members follow
    ends = [*(one.start() for one in articles[1:]), len(text)]
    for article, end in zip(articles, ends[: len(articles)], strict=True):
        body = text[article.end() : end]
        owner = article[2] if article[1] == "class" else owner
        for _, code, line in _DECLARED.findall(body):
            _definition(path, article[1], article[2], int(line), code, claims)
        for name, line in re.findall(r"`([^`]+)` \[?(\d+)(?=[\],\n]|$)", body):
            claims["name on a brief page"].add((path, name, int(line)))
        for base, names in re.findall(r"^Inherited from \[`([^`]+)`\]\([^)]*\): (.*)\.$", body, re.MULTILINE):
            kept = re.sub(r" \(\d+ of [\d,]+\)$", "", names)
            claims["inherited member"].update((path, owner, base, _unescaped(one)) for one in kept.split(", "))
    for row in _tables(text):
        if "signature" in row or "kind" in row:
            head = "\n".join(one for _, one in _SPAN.findall(row.get("decorators", "")))
            _definition(
                path,
                row["kind"],
                _code(row["name"]),
                _line(row["where"]),
                f"{head}\ndef f{_code(row.get('signature', ''))}".lstrip(),
                claims,
            )
            derived = row.get("derived from the code") or row.get("docstring, or derived from the code") or ""
            for part in derived.split("; "):
                if part.startswith("raises "):
                    names = (one for _, one in _SPAN.findall(part))
                    claims["raises"].update((path, _code(row["name"]), one) for one in names)
        elif "where" in row and ("field" in row or "module name" in row):
            name = _code(row.get("field") or row["module name"])
            claims["definition"].add((path, "variable", name, _line(row["where"])))


def _definition(path: str, label: str, name: str, line: int, code: str, claims: Claims) -> None:
    kind = label.removeprefix("async ")
    kind = "method" if kind in _METHODS else kind
    claims["definition"].add((path, kind, name, line))
    if label.startswith("async "):
        claims["async function"].add((path, name, line))
    *decorators, rest = re.split(r"\n(?=(?:async )?(?:def|class) |@)", code)
    for decorator in decorators:
        claims["decorator"].add((path, name, line, ast.dump(ast.parse(decorator.removeprefix("@")))))
    if kind != "class" and "(" in rest:  # a brief page leaves signatures out
        claims["signature"].add((path, name, line, signature(rest[rest.index("(") :])))


def _overview(path: str, text: str, claims: Claims) -> None:
    if match := re.search(r"^\(From \[?line (\d+)", text, re.MULTILINE):
        said = text.partition("\n\n")[2].rpartition("\n(From ")[0]
        said = re.sub(r"\AThe file is large, so this page is brief:[^\n]*\n", "", said.lstrip())
        claims["module docstring"].add((path, int(match[1]), words(_unlinked(said))[:6]))
    if match := re.search(r"is an entry point: runs as a script, by line (\d+)", text):
        claims["script guard"].add((path, int(match[1])))


def words(text: str) -> tuple[str, ...]:
    """The words of a text without its marks, for comparison."""
    return tuple(re.findall(r"[^\W_]+", text.lower()))


def _unlinked(text: str) -> str:
    return re.sub(r"\]\((?:[^()]|\([^()]*\))*\)", "] ", text.replace("```python\n", "").replace("> **", ""))


def _design(path: str, text: str, claims: Claims) -> None:
    for row in _tables(text):
        if "base" in row:
            claims["base class"].add((path, _line(row["where"]), _code(row["class"]), tail(_code(row["base"]))))
        elif "name" in row and "how" in row:
            claims[f"state: {row['kind']}"].add((path, _code(row["name"])))
        elif "what" in row:
            claims["starts"].add((path, row["kind"], _line(row["where"])))
    _, _, private = text.partition("**Private names of other packages**")
    for name in re.findall(r"`([^`]+)` \(\[?line \d+", private):
        claims["private name"].add((path, name))
    if match := re.match(r"Layer (\d+) of (\d+) by imports[^:]*(?:: it imports[^:]*)?: (.*)\.", text):
        down = re.search(r"reaches ([\d,]+) file", match[3])
        up = re.search(r"([\d,]+) reach(?:es)? it", match[3])
        counts = tuple(int(one[1].replace(",", "")) if one else 0 for one in (down, up))
        claims["layer"].add((path, int(match[1]), int(match[2]), *counts))


def _usage(path: str, sections: dict[str, str], claims: Claims) -> None:
    excerpt = re.compile(
        r"^\[?`([^`]+)`(?:\]\([^)]*\))? at " + _AT.pattern + r"\n\n(```+)python\n(.*?)\n\4$", re.M | re.S
    )
    for name, by, line, _, text in excerpt.findall(sections.get("Usage examples", "")):
        claims["usage excerpt"].add((path, name, _unescaped(by), int(line), text))
    for row in _tables(sections.get("Testing", "")):
        for name, target in re.findall(r"\[((?:[^\]\\]|\\.)*)\]\(([^)]*#L\d+)\)", row.get("reached by", "")):
            line = int(target.rpartition("#L")[2])
            claims["test reaches"].add((path, _code(row["definition"]), _unescaped(name), line))


def _dependencies(path: str, text: str, claims: Claims) -> None:
    for row in _tables(text):
        module, line, target = _code(row["module"]), _line(row["where"]), row["resolves to"]
        cell = re.sub(r"(^| )as `[^`]*`", "", row.get("names", ""))
        names = [name for _, name in _SPAN.findall(cell)] or [""]
        for name in names:
            claims["import"].add((path, line, module, name))
            if match := _LINK.match(target):
                claims["import resolved to a file"].add((path, line, module, name, _unescaped(match[1])))
            elif target == "unresolved":
                claims["import unresolved"].add((path, line, module, name))


def _facts(path: str, sections: dict[str, str], claims: Claims) -> None:
    for row in _tables(sections.get("Code patterns and idioms", "")):
        claims[row["pattern"]].add((path, _line(row["where"])))
    for row in _tables(sections.get("Security and safety", "")):
        claims["security finding"].add((path, _line(row["where"]), _unescaped(row["finding"])))
    for row in _tables(sections.get("Performance considerations", "")):
        if row["finding"] == "loop in a hot path":
            claims["performance: loop in a hot path"].add((path, *_hot(path, row)))
        else:
            claims[f"performance: {row['finding']}"].add((path, _line(row["where"])))
    for title, lead in (("Testing", ""), ("Training and backward", "training: ")):
        for row in _tables(sections.get(title, "")):
            if "kind" in row and (lead or row["kind"] == "test"):
                claims[f"{lead}{row['kind']}"].add((path, _line(row["where"])))


def _hot(path: str, row: dict[str, str]) -> tuple[object, ...]:
    """The function, the call in its loop (line, callee, line of the loop), and the loop that calls it."""
    said = re.match(r"line (\d+) calls (\S+) in the loop at line (\d+); a loop calls \S+ at (.*)$", row["evidence"])
    assert said is not None, row
    callee, place = _unescaped(said[2]), next(_places(said[4], path))
    return _code(row["code"]), int(said[1]), callee, int(said[3]), *place


def _modules(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if " is an nn.Module (bases " in line:
            yield _code(line)
        elif line.startswith("Also nn.Module subclasses"):
            yield from (name for _, name in _SPAN.findall(line.partition(": ")[2]))


def _references(path: str, text: str, claims: Claims) -> None:
    for part in map(str.strip, re.split(r"\n{2,}", text)):
        if part.startswith("Imported by "):
            found = {(path, _unescaped(by)) for by, _ in _AT.findall(part)}
            total = re.search(r" \(\d+ of ([\d,]+)\)\.$", part)
            claims["imported by"].update(found)
            claims["number of importers"].add((path, int(total[1].replace(",", "")) if total else len(found)))
        elif part.startswith("| name | subclassed by |"):
            for row in _tables(part):
                pairs = re.findall(r"`([^`]+)` \[?((?:[^\]\\,]|\\.)*):\d+", row["subclassed by"])
                owner = _code(row["name"])
                claims["subclassed by"].update((path, owner, _unescaped(by), name) for name, by in pairs)
        elif part.startswith("| name | called at |"):
            for row in _tables(part):
                found = set(_places(row["called at"], path))
                name, total = _code(row["name"]), re.search(r" \(\d+ of ([\d,]+)\)$", row["called at"])
                claims["called at"].update((path, name, by, line) for by, line in found)
                claims["number of calls"].add((path, name, int(total[1].replace(",", "")) if total else len(found)))
