"""C, C++, CUDA and other languages, read by universal-ctags where it is installed."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sternway.atlas._records import Definition, Facts, Import, Keyword
from sternway.atlas.read._words import WordIndex

MISSING = "universal-ctags is not installed, so definitions are not listed"
_FIELDS = "--fields=+nKSserl-P"
_TIME = 300.0  # seconds for one batch of files
_LOCAL = {"local", "parameter", "tparam", "macroparam"}
_PIECES = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|(?P<name>[A-Za-z_]\w*)",
    re.DOTALL,
)
_C_LIKE = {"C", "C++", "CUDA", "ObjectiveC", "Java", "Go", "Rust", "JavaScript", "TypeScript", "Kotlin"}


@functools.cache
def version() -> str:
    """The first line of ``ctags --version``; empty if ctags is missing or cannot write JSON."""
    if shutil.which("ctags") is None:
        return ""
    try:
        run = subprocess.run(["ctags", "--version"], capture_output=True, text=True, timeout=10, check=False)
        listed = subprocess.run(["ctags", "--list-features"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.partition("\n")[0] if "json" in listed.stdout else ""


def tags(root: Path, paths: list[str], languages: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    """ctags' records of each file, from one run for each language. ``languages``: the language of each path."""
    found: dict[str, list[dict[str, object]]] = {path: [] for path in paths}
    by_language: dict[str, list[str]] = {}
    for path in paths:
        if "\n" not in path:  # files are listed one a line
            by_language.setdefault(languages[path], []).append(path)
    for language, members in by_language.items():
        for record in _run(root, language, members):
            name = str(record.get("path"))[len(str(root)) + 1 :]
            if record.get("_type") == "tag" and name in found:
                found[name].append(record)
    return found


def _run(root: Path, language: str, paths: list[str]) -> list[dict[str, object]]:
    with tempfile.NamedTemporaryFile("wb") as listing:
        listing.write(b"".join(str(root / path).encode("utf-8", "surrogateescape") + b"\n" for path in paths))
        listing.flush()
        command = ["ctags", "--options=NONE", f"--language-force={language}", "--output-format=json", _FIELDS]
        command += ["--extras=+r", "--sort=no", "-f", "-", "-L", listing.name]
        try:
            run = subprocess.run(command, capture_output=True, timeout=_TIME, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
    records = []
    for line in run.stdout.split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:  # a name that is no UTF-8, or the empty line at the end
            continue
    return records


def read_tagged(text: str, language: str, records: list[dict[str, object]]) -> tuple[Facts, list[Keyword]]:
    """Facts and keywords of one file, from ctags' records of it."""
    definitions, imports = [], []
    for record in records:
        line, kind = int(str(record.get("line", 0))), str(record.get("kind", ""))
        name, scope = str(record["name"]), str(record.get("scope", ""))
        if kind == "header":
            imports.append(Import(line, name, 0, "", name, "module"))
        elif str(record.get("roles", "def")) == "def" and kind not in _LOCAL and not name.startswith("__anon"):
            whole = f"{scope}::{name}" if scope and "__anon" not in scope else name
            end = int(str(record.get("end", line)))
            definitions.append(Definition(whole, kind, line, end, str(record.get("signature", ""))))
    definitions.sort(key=lambda item: (item.line, item.name))
    purpose, line = first_comment(text) if language in _C_LIKE else ("", 0)
    facts = Facts(
        language,
        "ctags",
        purpose=purpose,
        purpose_line=line,
        definitions=tuple(dict.fromkeys(definitions)),
        imports=tuple(dict.fromkeys(imports)),
    )
    return facts, _keywords(text, language, facts.definitions)


def _keywords(text: str, language: str, definitions: tuple[Definition, ...]) -> list[Keyword]:
    lines: dict[str, set[int]] = {}
    words = WordIndex()
    if language in _C_LIKE:
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
    found = [
        Keyword(name, *kinds.get(name, ("name", 0)), tuple(sorted(at - {kinds.get(name, ("", 0))[1]})))
        for name, at in lines.items()
    ]
    return sorted([*found, *words.keywords()], key=lambda word: (word.name.casefold(), word.name, word.kind == "word"))


def first_comment(text: str) -> tuple[str, int]:
    """The comment that a file opens with, unless it is a licence; its first paragraph and its line."""
    for match in re.finditer(r"\s*(//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)", text[:20000], re.DOTALL):
        if text[: match.start(1)].strip() and not text[: match.start()].rstrip().endswith(("*/", "#pragma once")):
            break
        body = re.sub(r"(?m)^[ \t]*(//+|/\*+|\*+/|\*)[ \t]?|\*+/", "", match[1]).strip()
        if body and not re.search(r"(?i)copyright|licen[sc]e|spdx", body):
            return " ".join(body.partition("\n\n")[0].split()), text.count("\n", 0, match.start(1)) + 1
    return "", 0
