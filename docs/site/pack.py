"""A hook of mkdocs: all that the playground needs, in one script, since a page opened from disk cannot fetch files.

Pyodide's files, our schedules (which need only the standard library) and the worker, each compressed, as base64.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from schedules import schedules

from vendor import file_of

HERE = Path(__file__).parent / "playground"
PYODIDE = ("pyodide.asm.js", "pyodide.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def on_files(files: Any, config: Any) -> Any:
    """Add the script."""
    packed = {name: file_of("pyodide", name) for name in PYODIDE}
    packed["worker.js"] = (HERE / "worker.js").read_bytes()
    packed["sternway.zip"] = schedules()
    text = {name: base64.b64encode(gzip.compress(content, mtime=0)).decode() for name, content in packed.items()}
    script = f"globalThis.STERNWAY_PLAYGROUND = {json.dumps(text)};\n"
    files.append(File.generated(config, "site/playground/data.js", content=script))
    return files
