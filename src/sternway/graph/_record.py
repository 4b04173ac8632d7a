"""``record``: a context in which each new graph node is tagged with its module, source line and function.

A torch-function mode sees each call on tensors from Python, and the nodes behind its results. Forward hooks on the
model's modules say which module is running. One call may make several nodes: all nodes between its results and its
arguments get its tag.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from sternway._torch import require
from sternway._torch.tensors import version_of, without_torch_function
from sternway._tree import leaves
from sternway.errors import GraphError
from sternway.graph._saved import storage_of
from sternway.graph._tags import Tag, set_tag, tag_of
from sternway.graph._walk import is_leaf

_OURS = tuple(str(Path(package).parent) + os.sep for package in (torch.__file__, __file__))


@dataclass(frozen=True, slots=True)
class Write:
    """One in-place change: of which storage, to which version, by which function and where."""

    storage: int
    version: int
    op: str
    source: str
    module: str


class Recording(TorchFunctionMode):
    """A recording in progress; ``record`` makes one."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        values: bool = False,
        writes: bool = False,
        before_backward: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._model, self._values, self._log_writes = model, values, writes
        self._before_backward = before_backward
        self._outside = None if model is None else ""  # the module of what runs in no module
        self._running = threading.local()  # the modules whose forward is running in this thread
        self._handles: list[RemovableHandle] = []
        self.writes: deque[Write] = deque(maxlen=100_000)
        self.first_nonfinite: Tag | None = None

    def __enter__(self) -> Recording:
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._entering(name)))
                self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack().append(name)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack().pop()

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._running, "stack", None)
        if stack is None:
            stack = self._running.stack = []
        return stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # as in torch.cond: nothing has run yet
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "") or str(func)
        if name in ("backward", "__get__"):
            if self._before_backward is not None and name == "backward" and args and isinstance(args[0], Tensor):
                with without_torch_function():
                    self._before_backward(args[0])
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        before = [(tensor, _grad_fn(tensor), _version(tensor)) for tensor in given]
        result = func(*args, **kwargs)
        stack = self._stack()
        tag = Tag(stack[-1] if stack else self._outside, _source(), name)
        if name == "register_hook":
            self._hooked(given[0], tag)
            return result
        made = [*_tensors(result), *given]
        self._check(tag, given, made)
        stop = {node for _, node, _ in before if node is not None}
        _tag([node for tensor in made if (node := _grad_fn(tensor)) is not None], stop, tag)
        if self._log_writes:
            for tensor, _, version in before:
                if _version(tensor) != version and (storage := storage_of(tensor)) is not None:
                    self.writes.append(Write(storage, _version(tensor), name, tag.source, tag.module or ""))
        return result

    def _hooked(self, tensor: Tensor, tag: Tag) -> None:
        if tensor.grad_fn is not None:
            known = tag_of(tensor.grad_fn)
            if known is None:
                set_tag(tensor.grad_fn, tag)
            else:  # the nodes of one call share a tag, but the hook is on this one
                known = Tag(known.module, known.source, known.op, known.hooks, known.nonfinite)
                set_tag(tensor.grad_fn, known)
            (known or tag).hooks += 1

    def _check(self, tag: Tag, given: list[Tensor], made: list[Tensor]) -> None:
        if not self._values or self.first_nonfinite is not None:
            return
        with without_torch_function(), torch.no_grad():
            wrong = [shown for tensor in made if (shown := nonfinite(tensor))]
            if wrong and not any(nonfinite(tensor) for tensor in given):
                tag.nonfinite = f"{wrong[0]}; inputs {', '.join(map(magnitude, given)) or 'none'}"
                self.first_nonfinite = tag


def record(model: nn.Module | None = None, *, values: bool = False) -> Recording:
    """A context in which new graph nodes are tagged with their module and source line, which ``capture`` reports.

    Example:
        >>> from sternway import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> with graph.record(model):
        ...     loss = model(torch.ones(3, 4)).sum()
        >>> [(node.module, node.op) for node in graph.capture(loss, model).nodes if node.kind == "ReluBackward0"]
        [('1', 'relu')]

    Args:
        model: names the modules; without one, only source lines are recorded, and ``capture`` finds the modules as in
            a graph that was not recorded.
        values: also check every result, and note the first operation that makes NaN or ±inf from finite inputs:
            ``find_nonfinite`` reports it, and so does the recording's ``first_nonfinite``.

    The forward runs several times slower in this context. Tags are stored on the nodes and freed with them.
    """
    require("graph")
    GraphError.unless(
        model is None or isinstance(model, nn.Module), "model must be an nn.Module", model, "pass it, or leave it out"
    )
    return Recording(model, values=values)


def _tag(found: list[Any], stop: set[Any], tag: Tag) -> None:
    """Tag the nodes from ``found`` down to ``stop`` that have no tag yet."""
    seen: set[Any] = set()
    while found:
        node = found.pop()
        if node in seen or node in stop or is_leaf(node) or tag_of(node) is not None:
            continue
        seen.add(node)
        set_tag(node, tag)
        found += [child for child, _ in node.next_functions if child is not None]


def _source() -> str:
    """The nearest line outside torch and sternway."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return ""
    return shown_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def shown_line(file: str, line: int, function: str) -> str:
    """``model.py:31 in forward``; the path is relative if it is below the working directory."""
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line} in {function}"


def _grad_fn(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under no_grad whose base was changed in place
        return None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def nonfinite(tensor: Tensor | None) -> str:
    """How many elements are NaN and ±inf; "" if all are finite."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return ""
    flat = tensor.detach()
    if bool(torch.isfinite(flat).all()):
        return ""
    nans, infs = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
    return f"{nans} NaN and {infs} ±inf of {flat.numel()} elements"


def magnitude(tensor: Tensor | None) -> str:
    """The range of absolute values of the finite elements."""
    if tensor is None:
        return "undefined"
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return "empty"
    size = tensor.detach().abs().flatten().double()
    size = size[torch.isfinite(size)]
    return f"|x| in [{float(size.min()):.3g}, {float(size.max()):.3g}]" if len(size) else "nothing finite"
