"""``why_alive``: the chains of references that keep a tensor alive, through Python objects and graph nodes.

Python's garbage collector knows the references between Python objects, but not what a graph node holds in C++. So the
graphs of all live tensors are searched for nodes that saved this tensor's storage, and the chain continues from the
tensor whose graph it is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from sternway._torch import require
from sternway._torch.autograd import sequence_number
from sternway._torch.nodes import saved_parts
from sternway._torch.tensors import without_torch_function
from sternway.errors import GraphError
from sternway.graph._record import shown_line
from sternway.graph._saved import storage_of
from sternway.graph._walk import forward_order

_MAX_STEPS = 12


@dataclass(frozen=True, slots=True)
class Owners:
    """Chains of references, each from the tensor outwards; prints as one line a chain.

    Example:
        >>> print(why_alive(torch.ones(2)))
        nothing but the caller keeps it alive
    """

    chains: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ← ".join(chain) for chain in self.chains) or "nothing but the caller keeps it alive"


def why_alive(tensor: Tensor) -> Owners:
    """The chains of references (variables, lists, closures, attributes, saved tensors of graph nodes) to ``tensor``.

    Example:
        >>> cache = [torch.ones(2)]
        >>> "[0] of a list" in str(why_alive(cache[0]))
        True

    Each chain ends at a variable of a running function or at a global of a module. Variables of the function that
    calls ``why_alive`` are left out.
    """
    require("graph")
    GraphError.unless(isinstance(tensor, Tensor), "why_alive must be passed a tensor", tensor, "pass a tensor")
    search = _Search(sys._getframe(1))
    chains = search.chains(tensor, callers=False)
    for root, node, slot in _saved_by(tensor):
        step = f"saved as {slot!r} by {type(node).__name__}"
        found = search.chains(root) or [()]
        chains += [(step, f"the graph of {_shape(root)}", *chain) for chain in found]
    return Owners(tuple(dict.fromkeys(chains)))


class _Search:
    def __init__(self, caller: FrameType) -> None:
        self.caller = caller
        self.variables: dict[int, list[tuple[FrameType, str]]] = {}  # of running functions; gc does not report them
        for frame in sys._current_frames().values():
            step: FrameType | None = frame
            while step is not None:
                if step.f_code.co_filename != __file__ and step.f_code.co_name != "<module>":
                    for name, value in list(step.f_locals.items()):
                        self.variables.setdefault(id(value), []).append((step, name))
                step = step.f_back

    def chains(self, thing: Any, *, callers: bool = True) -> list[tuple[str, ...]]:
        """Breadth first, each owner once; a chain ends at a variable. The caller's own count only if ``callers``."""
        done: list[tuple[str, ...]] = []
        seen = {id(thing)}
        layer: list[tuple[Any, tuple[str, ...]]] = [(thing, ())]
        hidden = {id(done), id(seen), id(self.variables)}
        for _ in range(_MAX_STEPS):
            following: list[tuple[Any, tuple[str, ...]]] = []
            hidden |= {id(layer), id(following), *(id(pair) for pair in layer)}
            for held, chain in layer:
                for frame, name in self.variables.get(id(held), ()):
                    if callers or chain or frame is not self.caller:
                        where = shown_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
                        done.append((*chain, f"variable {name!r} ({where})"))
                for owner in gc.get_referrers(held):
                    if id(owner) in hidden or id(owner) in seen or _passing(owner):
                        continue
                    seen.add(id(owner))
                    step, last = _step(owner, held)
                    if step is not None and last:
                        done.append((*chain, step))
                    elif step is not None:
                        following.append((owner, (*chain, step)))
            layer = following
            if not layer:
                break
        return done


def _passing(owner: Any) -> bool:
    """Whether to skip an owner: frames, whose variables are known already, and objects of the search itself."""
    return isinstance(owner, FrameType) or type(owner).__name__ in ("list_iterator", "generator", "tuple_iterator")


def _step(owner: Any, held: Any) -> tuple[str | None, bool]:
    """How ``owner`` holds ``held``, and whether the chain ends there; None if this is no reference to report."""
    if isinstance(owner, dict):
        if "__name__" in owner and "__builtins__" in owner:
            name = next((key for key, value in owner.items() if value is held), "?")
            return f"global {name!r} of module {owner['__name__']}", True
        key = next((repr(key) for key, value in owner.items() if value is held), None)
        return (f"[{key}] of a dict" if key is not None else None), False
    if isinstance(owner, list | tuple):
        index = next((index for index, value in enumerate(owner) if value is held), None)
        return (None if index is None else f"[{index}] of a {type(owner).__name__}"), False
    if isinstance(owner, CellType):
        return "a variable of a closure", False
    if isinstance(owner, FunctionType | MethodType | BuiltinFunctionType):
        return f"function {getattr(owner, '__qualname__', owner)}", False
    if isinstance(owner, ModuleType):
        return f"module {owner.__name__}", True
    if isinstance(owner, nn.Module):
        return f"an attribute of a {type(owner).__name__}", False
    if isinstance(owner, Tensor):
        return (
            f".grad of {_shape(owner)}" if owner.is_leaf and owner.grad is held else f"held by {_shape(owner)}"
        ), False
    return f"held by a {type(owner).__name__}", False


def _saved_by(tensor: Tensor) -> Iterator[tuple[Tensor, Any, str]]:
    """The graph nodes that saved the tensor's storage, each with a live tensor whose graph it is in."""
    storage = storage_of(tensor)
    if storage is None:
        return
    roots = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and _has_graph(thing)]
    seen: set[Any] = set()
    for root in sorted(roots, key=lambda each: -sequence_number(each.grad_fn)):
        for node in forward_order([root.grad_fn]):
            if node in seen:
                continue
            seen.add(node)
            for name, part in saved_parts(node):
                if part.unpack_hook is None and storage_of(part.data) == storage:
                    yield root, node, name


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except Exception:  # gc also lists objects that are half made or half gone
        return False


def _shape(tensor: Tensor) -> str:
    with without_torch_function():
        return f"a {str(tensor.dtype)[6:]} tensor of shape {tuple(tensor.shape)}"
