"""What a replay would not do: found in one forward that is watched, before anything is captured.

A replay runs the kernels of the forward that was captured, and no Python. Where Python has a part in each forward, the
module must not be captured: it waits for a result of the GPU, reads a tensor on the host, draws random numbers there,
registers hooks, or leaves something behind in a module.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from sternway._torch.cuda_graphs import own_names, runs_compiled_code
from sternway._torch.hooks import hooks_registered
from sternway._torch.saved_hooks import intercept
from sternway._tree import CONSTANT, leaves

_LIBRARIES = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, str(Path(__file__).parents[1])))


class Uncapturable(BaseException):
    """Why a module cannot be captured. Not an ``Exception``, so that no model's own code catches it."""


def watch(root: nn.Module, modules: Sequence[nn.Module], forward: Callable[[], object]) -> list[Tensor]:
    """Run the forward once.

    Returns:
        The tensors that it reads and did not make. A graph reads their memory, so they must be kept. What compiled code
        reads is not among them: it holds its own.

    Raises:
        Uncapturable: if a replay would not do the same.
    """
    before, hooks, drawn = own_names(modules), hooks_registered(), _host_generators()
    operators = _Operators()
    watched = nullcontext() if runs_compiled_code(modules) else intercept(operators)
    try:
        with _no_waits(), watched:
            forward()
    except Uncapturable as error:
        raise Uncapturable(f"{error}{place_of(error, root)}") from None
    except RuntimeError as error:
        raise Uncapturable(f"{reason_of(error)}{place_of(error, root)}") from error
    if hooks_registered() != hooks:
        raise Uncapturable("the forward registers hooks on tensors (register_hook, state.on_grad), which run in Python")
    if _host_generators() != drawn:
        raise Uncapturable("the forward draws random numbers on the host, which a replay would repeat")
    names = {id(module): name for name, module in root.named_modules()}
    for module, old, new in zip(modules, before, own_names(modules), strict=True):
        for key in (old.keys() | new.keys()).difference(getattr(module, "set_by_forward", ())):
            if not _is_same(old.get(key), new.get(key)):
                where = ".".join(filter(None, (names.get(id(module), type(module).__name__), key)))
                raise Uncapturable(f"the forward sets {where}, which a replay would not do")
    return list(operators.read.values())


class TensorAttributes:
    """The tensors that modules have as plain attributes, neither parameters nor buffers: a table made when needed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._known = [
            (names, key, value)
            for module in modules
            for names in [module.__dict__]
            for key, value in names.items()
            if isinstance(value, Tensor) and key not in getattr(module, "set_by_forward", ())
        ]

    def were_replaced(self) -> bool:
        """Whether one is another tensor now."""
        return any(names.get(key) is not value for names, key, value in self._known)


def reason_of(error: BaseException) -> str:
    """What an error says, in one line; those of a wait and of a capture in words of their own."""
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if "synchronizing CUDA operation" in first:
        return "the forward waits for a result of the GPU"
    if "capturing" in first or "capture" in first:
        return f"CUDA cannot capture an operation ({first})"
    return f"{type(error).__name__}: {first}"


def place_of(error: BaseException, root: nn.Module) -> str:
    """Where an error was raised, as " in the module a.b, file.py line 3", as far as its traceback tells."""
    names = {id(module): name or type(module).__name__ for name, module in root.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            module = names[id(owner)]
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            line = f"{frame.f_code.co_filename} line {number}"
    found = ", ".join(filter(None, (f"the module {module}" if module else "", line)))
    return f" in {found}" if found else ""


class _Operators:
    """Stands in for every operator. Notes what they read, and refuses those that bring a tensor of the host to the GPU.

    Its value would be that of the capture for ever. A number that the forward made itself is a constant, as in code.

    Attributes:
        read: tensors on the GPU that were not made here, by id.
    """

    def __init__(self) -> None:
        self.read: dict[int, Tensor] = {}
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def __call__(self, operator: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = operator(*args, **kwargs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in made)
        for tensor in given:
            if tensor.is_cuda:
                if id(tensor) not in self._made:
                    self.read[id(tensor)] = tensor
            elif on_gpu and tensor.is_cpu and (tensor.ndim or id(tensor) not in self._made):
                raise Uncapturable(f"the forward reads a tensor on the CPU, of shape {tuple(tensor.shape)}")
        known = {id(tensor) for tensor in given}
        for tensor in made:
            if id(tensor) not in known:  # else it was written in place
                self._made[id(tensor)] = tensor
        return result


@contextmanager
def _no_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _host_generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in state]


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, CONSTANT) and old == new)
