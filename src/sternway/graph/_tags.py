"""What ``record`` writes on a node, and ``capture`` and the explainers read: the module, the line, the operation.

torch gives each node a dictionary that lives as long as the node does, so a tag keeps nothing alive and is never stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEY = "sternway"


@dataclass(slots=True)
class Tag:
    module: str
    source: str
    op: str
    hooks: int = 0  # tensor hooks that were seen being registered
    nonfinite: str = ""  # what was wrong with the operation's outputs while its inputs were right


_written = False  # whether this process has ever written a tag


def tag_of(node: Any) -> Tag | None:
    if not _written:  # looking would make every node a dictionary of its own
        return None
    found = node.metadata.get(KEY)
    return found if isinstance(found, Tag) else None


def set_tag(node: Any, tag: Tag) -> None:
    global _written
    _written = True
    node.metadata[KEY] = tag
