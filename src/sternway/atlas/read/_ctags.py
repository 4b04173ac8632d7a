"""Languages without a parser of ours (Java, Go, Rust…), read by universal-ctags where it is installed."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from sternway.atlas._records import Definition, Facts, Import, Keyword
from sternway.atlas.python._docstrings import first_paragraph
from sternway.atlas.read._comments import first_comment, keywords_of

MISSING = "universal-ctags is not installed, so definitions are not listed"
_FIELDS = "--fields=+nKSserl-P"
_TIME = 300.0  # seconds for one batch of files
_LOCAL = {"local", "parameter", "tparam", "macroparam"}
_C_LIKE = {"ObjectiveC", "Java", "Go", "Rust", "Kotlin"}


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
    doc, line = first_comment(text) if language in _C_LIKE else ("", 0)
    facts = Facts(
        language,
        "ctags",
        purpose=first_paragraph(doc),
        purpose_line=line,
        doc=doc,
        definitions=tuple(dict.fromkeys(definitions)),
        imports=tuple(dict.fromkeys(imports)),
    )
    return facts, keywords_of(text, facts.definitions, has_comments=language in _C_LIKE)
