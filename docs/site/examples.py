"""An extension of griffe: a section that docstrings here call "Example:" is the one that griffe calls "Examples:"."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Rename the heading, so that what follows is code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^( *)Example(, [^:]*)?:$", r"\1Examples:", obj.docstring.value)
