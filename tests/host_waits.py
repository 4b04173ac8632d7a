"""What would make the host wait for a GPU, seen without one: a block that notes it, with the line of ours that did it.

A GPU runs behind the host, which waits for it only to read a value: to make a number of it, to look which elements of
a mask are set, to copy it elsewhere. On a CPU the same calls are made, and cost nothing. So steps can be watched there.

Tensors of several devices that meet in one operator are noted, too. Only operators of this thread are seen. Without a
GPU a backward runs on the thread that calls it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sternway

OURS = Path(sternway.__file__).parent
_NOT_LOOKED_AT = (str(Path(torch.__file__).parent), __file__, "<")

READS = {
    "aten::_local_scalar_dense",  # float(x), x.item(), if x:
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
}
"""Operators whose result, or its size, the host must know."""
MASKS = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::_to_copy", "aten::copy_"}
METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Methods that read memory without an operator, if it is the host's already."""
MAKERS = ("tensor", "as_tensor")
"""What copies numbers of Python to a device, if told one: from memory that is not pinned, so that the host waits."""


class HostWait(NamedTuple):
    """One wait: what was called, and the line of our library, or of a test's, that did."""

    what: str
    file: str
    function: str
    line: int

    @property
    def is_ours(self) -> bool:
        return OURS in Path(self.file).parents

    @property
    def place(self) -> tuple[str, str]:
        """The file, below ours, and the function."""
        return (str(Path(self.file).relative_to(OURS)) if self.is_ours else self.file), self.function

    def __str__(self) -> str:
        return f"{self.what} in {self.file}:{self.line} ({self.function})"


@contextmanager
def host_waits() -> Iterator[list[HostWait]]:
    """A block in which this thread's waits are noted. All calls do what they always do."""
    found: list[HostWait] = []
    thread = threading.get_ident()

    def note(what: str) -> None:
        if threading.get_ident() == thread:
            found.append(_caller(what))

    before = {name: getattr(torch.Tensor, name) for name in METHODS}
    makers = {name: getattr(torch, name) for name in MAKERS}
    try:
        for name, method in before.items():
            setattr(torch.Tensor, name, _noting(method, f"Tensor.{name}", note))
        for name, maker in makers.items():
            setattr(torch, name, _noting(maker, f"torch.{name}", note, only_with="device"))
        with _Operators(note):
            yield found
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)
        for name, maker in makers.items():
            setattr(torch, name, maker)


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in READS or (name in MASKS and _has_mask(args)) or (name in COPIES and _leaves(args, kwargs)):
            self._note(name)
        elif name not in COPIES and _mixes(args, kwargs):
            self._note(f"{name} of tensors on several devices")
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Whether elements are chosen by a mask: how many is not known. One number is put there without a look."""
    is_mask = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return is_mask and not (len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1)


def _leaves(args: Any, kwargs: Any) -> bool:
    """Whether a copy goes to another device."""
    source = args[0] if len(args) < 2 else args[1]
    target = (kwargs or {}).get("device") if len(args) < 2 else args[0].device
    return target is not None and torch.device(target).type != source.device.type


def _mixes(args: Any, kwargs: Any) -> bool:
    """Whether tensors of several devices meet; a number on the host may meet any."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return len({tensor.device.type for tensor in tensors if tensor.ndim or not tensor.is_cpu}) > 1


def _noting(call: Any, name: str, note: Callable[[str], None], only_with: str | None = None) -> Any:
    @functools.wraps(call)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if only_with is None or kwargs.get(only_with) is not None:
            note(name)
        return call(*args, **kwargs)

    return noting


def _caller(what: str) -> HostWait:
    """The innermost line that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_LOOKED_AT):
        frame = frame.f_back
    return HostWait(what, frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)
