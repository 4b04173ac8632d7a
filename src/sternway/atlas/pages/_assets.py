"""The style sheet and the script that all pages share."""

from __future__ import annotations

from pathlib import Path

_NAMES = ("atlas.css", "atlas.js")


def assets() -> dict[str, str]:
    """Output path → text."""
    folder = Path(__file__).parent / "assets"
    return {f"_site/{name}": (folder / name).read_text("utf-8") for name in _NAMES}
