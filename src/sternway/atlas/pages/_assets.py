"""The style sheet and the script that all pages share."""

from __future__ import annotations

from pathlib import Path


def assets() -> dict[str, str]:
    """Output path → text."""
    folder = Path(__file__).parent / "assets"
    script = "".join((folder / name).read_text("utf-8") for name in ("search.js", "atlas.js"))
    return {"_site/atlas.css": (folder / "atlas.css").read_text("utf-8"), "_site/atlas.js": script}
