"""What is known of a graph while Dynamo traces it, passed to traced code as shapes.

``ask`` and ``tell`` are operators for their fake implementations only, which run while tracing. Their answer is a
shape, which Dynamo knows as numbers; the nodes are dead code afterwards.

Notes are kept on Dynamo's own objects: on the fake tensor that an ``on_grad`` returns, that it did; on the fake keys,
which state they come from; on the record of the graph, how many marks it has.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from sternway._torch.tracing import carry_functions, graph_being_traced, traced_code


@dataclass(slots=True)
class _Tracing:
    """What is known of the graph that is traced."""

    graph: int
    root: Tensor | None = None  # the key of the one state in it, as it came in
    marks: int = 0


def ask(y: Tensor, key: Tensor) -> Tensor:
    """A shape of: the graph's number; 1 if it has another state; how many marks ago ``y`` was returned, 0 if never."""
    graph = graph_being_traced()
    if graph is None:
        return torch.empty(0, 0, 0)
    carry_functions(graph, "fns")
    tracing = _known(graph)
    root = root_of(key)
    tracing.root = root if tracing.root is None else tracing.root
    of, number = getattr(y, "_sternway_mark", (None, 0))
    back = tracing.marks - number + 1 if of is root else 0
    return torch.empty(tracing.graph, int(tracing.root is not root), back)


def tell(y: Tensor, key: Tensor) -> Tensor:
    """Note that ``y`` is returned by an ``on_grad``."""
    graph = graph_being_traced()
    if graph is not None:
        tracing = _known(graph)
        tracing.marks += 1
        _note(y, "_sternway_mark", (root_of(key), tracing.marks))
    return torch.empty(0)


def mark(key: Tensor, graph: int, refusal: int) -> tuple[Tensor, Tensor]:
    """The next key, of the same root; and a token."""
    following, token = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    _note(following, "_sternway_root", root_of(key))
    return following, token


def root_of(key: Tensor) -> Tensor:
    """The key that this one was counted up from, in this graph."""
    root: Tensor = getattr(key, "_sternway_root", key)
    return root


def _known(graph: Any) -> _Tracing:
    known: _Tracing | None = getattr(graph, "_sternway_state", None)
    if known is None:
        known = _Tracing(_number(traced_code(graph)))
        _note(graph, "_sternway_state", known)
    return known


def _number(code: CodeType) -> int:
    """The same for all graphs of one code in every process, so that torch finds compiled graphs in its cache."""
    place = (code.co_filename, code.co_firstlineno, code.co_name, code.co_code, list(code.co_positions()))
    return 1 + zlib.crc32(repr(place).encode()) % 2**31


def _note(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)
