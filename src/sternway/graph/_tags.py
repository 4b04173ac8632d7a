"""Tags: the module, source line and function of a node, which ``record`` writes and ``capture`` reads.

They are stored in ``node.metadata``, a dictionary that lives as long as the node. So a tag keeps nothing alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEY = "sternway"


@dataclass(slots=True)
class Tag:
    module: str | None  # None where no model was recorded, "" outside its modules
    source: str
    op: str
    hooks: int = 0  # tensor hooks registered while recording
    nonfinite: str = ""  # NaN and ±inf in the outputs, where the inputs were finite


_written = False  # whether any tag was written in this process


def tag_of(node: Any) -> Tag | None:
    if not _written:  # reading `metadata` would allocate a dictionary for every node
        return None
    found = node.metadata.get(KEY)
    return found if isinstance(found, Tag) else None


def set_tag(node: Any, tag: Tag) -> None:
    global _written
    _written = True
    node.metadata[KEY] = tag
