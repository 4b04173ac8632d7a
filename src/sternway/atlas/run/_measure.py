"""Measured facts: run ``path.py:function`` in a process of its own, and show its numbers on the modules' pages."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sternway.atlas.read._tree import MARK
from sternway.atlas.relate._context import Relations
from sternway.atlas.run._store import write
from sternway.errors import AtlasError

_FILE = "measured.json"


def measure(target: str, root: Path, out: Path, seconds: float) -> str:
    """Run the target and return a JSON record of what was measured.

    Raises:
        AtlasError: it failed, or took longer than ``seconds``.
    """
    file, _, function = target.rpartition(":")
    path = next((found for found in (Path(file), root / file) if file and found.is_file()), None)
    if path is None or not function.isidentifier():
        raise AtlasError(
            "--measure must be path/to/file.py:function", got=repr(target), fix="name a file and a function in it"
        )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "sternway.atlas.run._measure_run", str(path), function, str(result), str(root)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise AtlasError(
                f"the measured function must end within {seconds:g} s",
                got=f"{target}, which was still running",
                fix="use a smaller model, or allow more with --measure-seconds",
            ) from None
        if run.returncode != 0 or not result.exists():
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise AtlasError("the measured function failed", got=f"{target}: {last}", fix="run it alone to see why")
        record: dict[str, Any] = json.loads(result.read_text("utf-8"))
    record["target"] = target
    record["command"] = shlex.join(["sternway", "atlas", os.path.basename(root), "--measure", target])
    return json.dumps(record, sort_keys=True)


def keep(out: Path, measured: str) -> None:
    """Store the record for later runs; an empty one removes it."""
    if measured:
        write(out / MARK / _FILE, measured)
    else:
        (out / MARK / _FILE).unlink(missing_ok=True)


def kept(out: Path, sources: Mapping[str, str]) -> str:
    """The record of an earlier run, if none of the measured files has changed; else empty."""
    try:
        text = (out / MARK / _FILE).read_text("utf-8")
        files = json.loads(text)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return text if all(sources.get(path) == digest for path, digest in files.items()) else ""


def pages(measured: str) -> dict[str, str]:
    """The pages with measured graphs, by their output paths."""
    found: dict[str, str] = json.loads(measured)["pages"] if measured else {}
    return {path: text for path, text in found.items() if re.fullmatch(r"_site/backward[\w.~+-]*\.html", path)}


def spread(measured: str, whole: Relations) -> Relations:
    """Add each file's measurements to its context."""
    if not measured:
        return whole
    record = json.loads(measured)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in record["rows"]:
        rows[row["path"]].append(row)
    made = dict(whole.contexts)
    for path, found in rows.items():
        if path in made:
            part = {key: record[key] for key in ("target", "command", "date", "machine", "whole")}
            made[path] = made[path]._replace(measured=json.dumps({**part, "rows": found}, sort_keys=True))
    return whole._replace(contexts=made)
