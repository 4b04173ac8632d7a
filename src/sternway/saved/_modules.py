"""Which module is running, and which storages belong to parameters and buffers.

Both are read from the call stack when a tensor is saved: every call of a module has a frame of ``nn.Module``'s own.
So modules need no hooks, which a compiler would see, and there is no global state. Names are those of the outermost
module that is running, or of the model that a policy was given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sternway._torch.saved_hooks import module_call_code
from sternway._torch.tensors import base_of, is_view, storage_id
from sternway.errors import SavedError

_PLAIN = (Tensor, nn.Parameter)


def _running(frame: FrameType | None, call: CodeType) -> Iterator[nn.Module]:
    """The modules whose calls are on the stack, innermost first."""
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        frame = frame.f_back


class Names:
    """Names of modules and storages of models, as far as they have been seen."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._owned: set[int] = set()
        self._call = module_call_code()

    def know(self, model: nn.Module) -> None:
        """Learn the names and the storages of a model."""
        for name, module in model.named_modules():
            plain = ".".join(part for part in name.split(".") if part != "_orig_mod")  # a compiled module's own
            self._names.setdefault(module, plain or type(model).__name__)
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                self._owned.add(storage_id(tensor))

    def current(self) -> str:
        """The name of the module that runs; empty if none does."""
        stack = _running(sys._getframe(1), self._call)
        module = next(stack, None)
        if module is None:
            return ""
        name = self._names.get(module)
        if name is None:
            outermost = module
            for outer in stack:
                outermost = outer
            self.know(outermost)
            name = self._names.get(module)
            if name is None:  # made during the forward
                name = self._names[module] = f"{type(outermost).__name__}.{type(module).__name__}"
        return name

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is a parameter, a buffer, a view of one, or a leaf: its memory is in use anyway."""
        base = base_of(tensor) if is_view(tensor) else tensor
        if base is not None and (isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf)):
            return True
        return storage_id(tensor) in self._owned


class Where:
    """A choice of modules by patterns as for file names; a module is chosen together with all that it contains."""

    def __init__(self, patterns: str | Iterable[str] | None) -> None:
        self._patterns = None if patterns is None else ([patterns] if isinstance(patterns, str) else list(patterns))
        for pattern in self._patterns or ():
            if not isinstance(pattern, str):
                raise SavedError(
                    "where must be a pattern for names of modules, or several",
                    got=repr(pattern),
                    fix='pass one such as "blocks.*"',
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
