"""Which module is running, and which storages are parameters and buffers.

Both are read off the call stack when a tensor is saved: every call of a module has a frame of ``nn.Module``'s own.
So there are no hooks on modules, which would show in compiled ones, and nothing is global. Names are those of the
outermost module that is running, or of the model that a policy was given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sternway.errors import SavedError

_CALL = nn.Module._wrapped_call_impl.__code__
_PLAIN = (Tensor, nn.Parameter)


def _running(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose calls are on the stack, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


class Names:
    """Modules' names and models' storages, as far as they have been met."""

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._owned: set[int] = set()
        for model in models:
            self.know(model)

    def know(self, model: nn.Module) -> None:
        """Take the names and the storages of a model."""
        for name, module in model.named_modules():
            plain = ".".join(part for part in name.split(".") if part != "_orig_mod")  # a compiled module's own
            self._names.setdefault(module, plain or type(model).__name__)
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                self._owned.add(tensor.untyped_storage()._cdata)

    def current(self) -> str:
        """The name of the module that runs; empty if none does."""
        stack = _running(sys._getframe(1))
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
        """Whether the tensor is a parameter or a buffer, or a view of one, or a leaf: it is there anyway."""
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and (isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf)):
            return True
        return tensor.untyped_storage()._cdata in self._owned


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
