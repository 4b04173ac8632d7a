"""What the written Markdown pages claim, read back from their text alone."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Claims = dict[str, set[tuple[object, ...]]]  # kind → (path, …)

_SECTION = re.compile(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\]\\]|\\.)*)\]\(([^)]*?)(?:#L(\d+))?\)")
_AT = re.compile(r"\[((?:[^\]\\]|\\.)*):(\d+)\]\([^)]*#L\d+\)")
_SPAN = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
_KEYWORD = re.compile(r"^- (`+) ?(.+?) ?\1 (\w+)(.*)$", re.MULTILINE)


def read(out: Path) -> Claims:
    """Every claim of every page."""
    claims: Claims = defaultdict(set)
    for page in sorted(out.rglob("*_docs.md")):
        text = page.read_text("utf-8")
        head, _, _ = text.partition("\n## Original source\n")
        sections = dict(_SECTION.findall(head + "\n"))
        path = _code(next(row[1] for row in _rows(sections["Metadata"]) if row[0] == "Path"))
        _structure(path, sections.get("Structure", ""), claims)
        _dependencies(path, sections.get("Dependencies", ""), claims)
        _facts(path, sections, claims)
        _references(path, sections.get("Cross-references", ""), claims)
        for row in _rows(sections.get("Architecture", "")):
            if row[0].startswith("`"):
                base = tail(_code(row[1]))
                claims["base class"].add((path, _line(row[-1]), _code(row[0]), base))
        if purpose := sections.get("Purpose", ""):
            claims["module docstring"].add((path, _line(purpose), _plain(purpose.rpartition(" (")[0])))
        if match := re.search(r"is an entry point: runs as a script, by line (\d+)", sections.get("Overview", "")):
            claims["script guard"].add((path, int(match[1])))
        for name in _modules(sections.get("Training", "")):
            claims["nn.Module subclass"].add((path, name))
        keywords = page.with_name(page.name.replace("_docs.md", "_kw.md")).read_text("utf-8")
        for _, name, kind, rest in _KEYWORD.findall(keywords):
            if kind != "word":
                claims["identifier"].update((path, name, int(line)) for line in re.findall(r"#L(\d+)\)", rest))
    return claims


def _rows(text: str) -> Iterator[list[str]]:
    for row in text.split("\n"):
        if row.startswith("| ") and not row.startswith("| --- |"):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r" \|(?: |$)", row[1:])[:-1]]


def _tables(text: str) -> Iterator[dict[str, str]]:
    """Rows by the names of their columns."""
    for part in text.split("\n\n"):
        rows = list(_rows(part))
        for row in rows[1:]:
            yield dict(zip(rows[0], row, strict=True))


def _code(cell: str) -> str:
    match = _SPAN.search(cell)
    return match[2] if match else ""


def _line(cell: str) -> int:
    lines = [int(line) for _, _, line in _LINK.findall(cell) if line]
    return lines[-1] if lines else 0


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


def _structure(path: str, text: str, claims: Claims) -> None:
    for row in _tables(text):
        name, kind, line = _code(row["name"]), row["kind"], _line(row["where"])
        claims["definition"].add((path, kind.removeprefix("async "), name, line))
        if kind.startswith("async "):
            claims["async function"].add((path, name, line))
        if kind.endswith(("function", "method")):
            claims["signature"].add((path, name, line, signature(_code(row.get("signature", "")))))
        for _, decorator in _SPAN.findall(row.get("decorators", "")):
            claims["decorator"].add((path, name, line, ast.dump(ast.parse(decorator.removeprefix("@")))))


def _dependencies(path: str, text: str, claims: Claims) -> None:
    for row in _tables(text):
        module, name, line = _code(row["module"]), _code(row.get("name", "")), _line(row["where"])
        claims["import"].add((path, line, module, name))
        target = row["resolves to"]
        if match := _LINK.match(target):
            claims["import resolved to a file"].add((path, line, module, name, _unescaped(match[1])))
        elif target == "unresolved":
            claims["import unresolved"].add((path, line, module, name))


def _facts(path: str, sections: dict[str, str], claims: Claims) -> None:
    for title in ("Patterns", "Performance", "Security", "Testing", "Training"):
        for row in _tables(sections.get(title, "")):
            if "kind" not in row:
                continue
            kind, line = row["kind"], _line(row["where"])
            if title == "Security":
                claims["security call"].add((path, line, _unescaped(kind)))
            elif title == "Training":
                claims[f"training: {kind}"].add((path, line))
            elif kind in ("generator", "dataclass", "context manager", "test", "property"):
                claims[kind].add((path, line))


def _modules(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if " is an nn.Module (bases " in line:
            yield _code(line)
        elif line.startswith("Also nn.Module subclasses"):
            yield from (name for _, name in _SPAN.findall(line.partition(": ")[2]))


def _references(path: str, text: str, claims: Claims) -> None:
    for part in text.split("\n\n"):
        if part.startswith("Imported by "):
            claims["imported by"].update((path, _unescaped(by)) for by, _ in _AT.findall(part))
        elif part.startswith("| name | subclassed by |"):
            for row in _tables(part):
                pairs = re.findall(r"`([^`]+)` " + _AT.pattern, row["subclassed by"])
                owner = _code(row["name"])
                claims["subclassed by"].update((path, owner, _unescaped(by), name) for name, by, _ in pairs)
        elif part.startswith("| name | called at |"):
            for row in _tables(part):
                found = {(_unescaped(by), int(line)) for by, line in _AT.findall(row["called at"])}
                name, total = _code(row["name"]), re.search(r" \(\d+ of ([\d,]+)\)$", row["called at"])
                claims["called at"].update((path, name, by, line) for by, line in found)
                claims["number of calls"].add((path, name, int(total[1].replace(",", "")) if total else len(found)))
