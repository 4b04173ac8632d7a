"""Which module is running, and which storages are parameters and buffers.

torch calls hooks before and after every module's forward. While a policy is active in a thread, those say whose tensors
are being saved. Names are those of the outermost module that is running, or of the model that a policy was given.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sternway.errors import SavedError


class _Running(threading.local):
    """This thread's modules, outermost first, while policies are active in it."""

    def __init__(self) -> None:
        self.active = 0
        self.stack: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.owned: set[int] = set()
        self.models: list[nn.Module] = []


_running = _Running()
_lock = threading.Lock()
_handles: list[RemovableHandle] = []
_watchers = 0


def _before(module: nn.Module, arguments: Any) -> None:
    if torch.compiler.is_compiling() or not _running.active:
        return
    if not _running.stack and not _running.models:
        _know([module])
    name = _running.names.get(module)
    if name is None:
        parent = _running.stack[-1] if _running.stack else ""
        name = f"{parent}.{type(module).__name__}".removeprefix(".")
    _running.stack.append(name)


def _after(module: nn.Module, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not _running.active:
        return
    if _running.stack:
        _running.stack.pop()


def _know(models: Sequence[nn.Module]) -> None:
    """Take the names and the storages of these models."""
    _running.names = {}
    _running.owned = set()
    for model in models:
        root = type(model).__name__
        _running.names |= {module: name or root for name, module in model.named_modules()}
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                _running.owned.add(tensor.untyped_storage()._cdata)


_PLAIN = (Tensor, nn.Parameter)


def watch(model: nn.Module | None) -> None:
    """Begin to look, in this thread."""
    global _watchers
    with _lock:
        if not _watchers:
            _handles.append(torch_module.register_module_forward_pre_hook(_before))
            _handles.append(torch_module.register_module_forward_hook(_after, always_call=True))
        _watchers += 1
    _running.active += 1
    if model is not None:
        _running.models.append(model)
        _know(_running.models)


def unwatch(model: nn.Module | None) -> None:
    """Look no more."""
    global _watchers
    with _lock:
        _watchers -= 1
        if not _watchers:
            while _handles:
                _handles.pop().remove()
    _running.active -= 1
    if model is not None:
        _running.models.remove(model)
        _know(_running.models)
    if not _running.active:
        _running.stack, _running.names, _running.owned = [], {}, set()


def current() -> str:
    """The name of the module that runs; empty if none does."""
    return _running.stack[-1] if _running.stack else ""


def is_owned(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter or a buffer, or a view of one, or a leaf: it is there anyway."""
    base = tensor._base if tensor._is_view() else tensor
    if base is None:
        return False
    if isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf):
        return True
    return tensor.untyped_storage()._cdata in _running.owned


class Where:
    """A choice of modules by name: patterns as in file names; a module is chosen with all that it contains."""

    def __init__(self, patterns: str | Iterable[str] | None) -> None:
        self._patterns = None if patterns is None else ([patterns] if isinstance(patterns, str) else list(patterns))
        for pattern in self._patterns or ():
            if not isinstance(pattern, str):
                raise SavedError(
                    "where is a pattern for modules' names, or several", got=repr(pattern), fix='such as "blocks.*"'
                )
        self._known: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        if self._patterns is None:
            return True
        found = self._known.get(name)
        if found is None:
            parts = name.split(".")
            names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            found = any(fnmatchcase(part, pattern) for part in names for pattern in self._patterns)
            self._known[name] = found
        return found
