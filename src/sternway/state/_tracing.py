"""What can be known of a graph while Dynamo traces it, told as shapes.

``ask`` and ``tell`` are operators for the sake of their fake implementations, which run while tracing. The answer is a
shape, which Dynamo knows as numbers; the nodes are dead code afterwards.

A function that is made in the trace has to be made again after the graph has run. Dynamo first asks whether it is a
constant, for which it looks at all that the function closes over, and guards on what it finds: a list that the hook
appends to would mean a recompile at every step. So such functions are told to be none (``_carry_functions``).

Notes are left on Dynamo's own objects: on the fake tensor of an ``on_grad``'s result, that it is one; on the fake keys,
which state they come from; on the record of the graph, how many marks it has.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class _Tracing:
    """What we know of the graph that is being traced."""

    graph: int
    root: Tensor | None = None  # the key of the one state in it, as it came in
    marks: int = 0


def ask(y: Tensor, key: Tensor) -> Tensor:
    """Of shape: the graph's number; 1 if it has another state; how many marks ago ``y`` was given back, 0 if never."""
    tracing = _tracing()
    if tracing is None:
        return torch.empty(0, 0, 0)
    _carry_functions()
    root = root_of(key)
    tracing.root = root if tracing.root is None else tracing.root
    of, number = getattr(y, "_sternway_mark", (None, 0))
    back = tracing.marks - number + 1 if of is root else 0
    return torch.empty(tracing.graph, int(tracing.root is not root), back)


def tell(y: Tensor, key: Tensor) -> Tensor:
    """Note that ``y`` is given back by an ``on_grad``."""
    tracing = _tracing()
    if tracing is not None:
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


def _tracing() -> _Tracing | None:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        code = output.root_tx.f_code
    except (ImportError, AttributeError):
        return None  # not under Dynamo, or one that is built differently: hooks work, these checks do not
    known: _Tracing | None = getattr(output, "_sternway_state", None)
    if known is None:
        known = _Tracing(_number(code))
        _note(output, "_sternway_state", known)
    return known


def _number(code: CodeType) -> int:
    """The same for all graphs of one code, in every process: torch is to find compiled graphs again in its cache."""
    place = (code.co_filename, code.co_firstlineno, code.co_name, code.co_code, list(code.co_positions()))
    return 1 + zlib.crc32(repr(place).encode()) % 2**31


def _carry_functions() -> None:
    """Tell Dynamo that the functions of the ``show_traced`` being traced are no constants."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.variables.functions import FunctoolsPartialVariable, NestedUserFunctionVariable

        output: Any = InstructionTranslator.current_tx().output
        left = list(output.current_tx.symbolic_locals["fns"].items)
        contents = output.side_effects.store_attr_mutations
    except (ImportError, AttributeError, KeyError):
        return  # built differently: hooks work, and may cost recompiles
    known: list[Any] = []
    while left:
        made = left.pop()
        kind = type(made)  # and not isinstance, which makes Dynamo look, and guard
        if any(made is one for one in known) or not issubclass(
            kind, FunctoolsPartialVariable | NestedUserFunctionVariable
        ):
            continue
        known.append(made)
        if made.source is None:
            with suppress(TypeError):  # built differently
                _note(made, "__class__", _carried(kind))
        left.append(getattr(made, "func", None))  # of a partial
        closure = getattr(made, "closure", None)
        for cell in [] if closure is None else closure.items:  # other functions that were made in the trace
            left.append(contents.get(cell, {}).get("cell_contents"))


@cache
def _carried(kind: type) -> type:
    known = kind.__name__ == "_Carried"
    return kind if known else type("_Carried", (kind,), {"is_python_constant": lambda self: False})


def _note(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)
