"""``sternway.schedule`` for the playground: it needs the standard library alone, so it runs in a browser."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MODEL = Path(__file__).parent / "playground" / "model.py"


def schedules() -> bytes:
    """``sternway.schedule`` and the files outside of it that it imports, and the playground's own Python, as a zip."""
    package = SOURCE / "sternway"
    outside = [package / name for name in ("__init__.py", "_bytes.py", "errors.py")]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path in (*outside, *sorted((package / "schedule").rglob("*.py"))):
            archive.write(path, path.relative_to(SOURCE))
        archive.write(MODEL, "model.py")
    return made.getvalue()
