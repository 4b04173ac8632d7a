"""A forward that runs again in the backward, and finds then what it found the first time.

A forward may change buffers and attributes: it counts its calls, follows a mean, or improves a spectral norm. When it
runs again they would change twice, and it would compute from other values. So it is given copies of what they were, and
what it does to these is dropped. Checkpoints of torch draw the same random numbers again, but not those of Python and
numpy, with which a forward may choose to skip a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sternway import saved
from sternway._torch.memory import same_values
from sternway._torch.tensors import version_of
from sternway._tree import leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._objects import GivenObjects
from sternway.pipeline.forward._plain import CONTAINERS, holds, refill
from sternway.pipeline.forward._python_random import PythonRandom
from sternway.pipeline.step._selective import is_kept

_Name = tuple[int, str]
_MISSING: Any = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_FIX = "leave its stage out of the schedule's recompute (with memory=, pass more), or change a copy"


@final
class RecomputedForward:
    """Calls a module so that it keeps its inputs alone, and runs again in the backward.

    Args:
        module: whose buffers the call may change.
        call: its forward.
        randomly: whether random numbers are the same again, as dropout needs.
        selective: whether it keeps the results of expensive operations, too, and does only the others again.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], *, randomly: bool = True, selective: bool = False
    ) -> None:
        self._module, self._call, self._randomly, self.selective = module, call, randomly, selective
        self._changing: dict[bool, frozenset[str]] = {}  # buffers that calls change, in training and in evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
        ):  # the compiler keeps changes apart from what it computes again, and chooses that
            return self._checkpoint(args, kwargs)
        given, objects = _tensors([args, kwargs]), GivenObjects(args, kwargs)
        versions = _versions(given)
        mode = self._module.training
        before = _Before(self._module, self._changing.get(mode), _tensors([*map(_container, args), kwargs]))
        drawn = PythonRandom() if self._randomly else None
        output = self._checkpoint(args, kwargs, lambda: self._contexts(before))
        before.drawn = drawn if drawn is not None and drawn.has_drawn() else None
        if versions != _versions(given):
            raise PipelineError(
                "what is recomputed cannot change in place what it is called with",
                got=f"a {type(self._module).__name__} that does",
                fix=_FIX,
            )
        if (changed := objects.changed()) is not None:
            raise PipelineError(
                "what is recomputed cannot change an object that it is called with: it would do so twice",
                got=f"a {type(self._module).__name__} that changes a {type(changed).__name__}",
                fix="pass use_cache=False, if it is a cache of transformers; else l" + _FIX[1:],
            )
        before.keep_changed()
        self._changing.setdefault(mode, frozenset(before.values))
        return output

    def _contexts(self, before: _Before) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not self.selective:
            return nullcontext(), before
        first, second = saved.recompute(is_kept)()
        return first, _Nested(before, second)

    def _checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Any = None) -> Any:
        options = {} if contexts is None else {"context_fn": contexts}
        return checkpoint(
            self._call, *args, use_reentrant=False, preserve_rng_state=self._randomly, **options, **kwargs
        )  # fmt: skip


class _Nested:
    """A block in two others."""

    def __init__(self, *blocks: AbstractContextManager[Any]) -> None:
        self._blocks, self._entered = blocks, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for block in self._blocks:
                entered.enter_context(block)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _Before:
    """The buffers of a module as they are before a call; entered, a block in which they are so again.

    Args:
        module: the module.
        changing: the names of those that calls are known to change; None if that is not known yet.
        held: what the call is given in containers and by name: checkpoints do not look whether that is changed later.

    Attributes:
        values: what those were that calls change.
        drawn: where Python and numpy were with their random numbers, if the call drew some.
    """

    def __init__(self, module: nn.Module, changing: frozenset[str] | None, held: list[Tensor]) -> None:
        self._module, self._held, self._versions = module, held, _versions(held)
        self._attributes = _attributes(module)
        self._attributes_now: dict[_Name, Any] = {}
        filled = {id(value): value for value in self._attributes.values() if type(value) in CONTAINERS}
        self._contents = [(value, copy.copy(value)) for value in filled.values()]  # of lists that modules have
        self._contents_now: list[tuple[Any, Any]] = []
        self.drawn: PythonRandom | None = None
        self._drawn_now: PythonRandom | None = None
        buffers = _buffers(module)
        self._found = {name: (buffer, version_of(buffer)) for name, buffer in buffers.items()}
        self._now: dict[str, Tensor] = {}
        self._is_known = changing is not None
        wanted = buffers if changing is None else changing & buffers.keys()
        self.values = _copies({name: buffers[name] for name in wanted})

    def keep_changed(self) -> None:
        """After the call: hold copies of no more than what calls change."""
        after, kept, same = _buffers(self._module), dict[str, Tensor](), dict[str, tuple[Tensor, int]]()
        for name, (buffer, version) in self._found.items():
            is_written = version_of(buffer) != version
            if name in self.values:
                # One that is known to change may do so in a later call. Batch norms write without counting.
                is_changed = self._is_known or is_written or after.get(name) is not buffer
                if is_changed or not same_values(buffer, self.values[name]):
                    kept[name] = self.values[name]
                else:
                    same[name] = buffer, version
            elif is_written:
                raise PipelineError(
                    "what is recomputed must change the same buffers in every call",
                    got=f"a {type(self._module).__name__} that now changes {name}, and did not before",
                    fix=_FIX,
                )
            else:
                same[name] = buffer, version
        self.values, self._found = kept, same
        now = _attributes(self._module)
        names = {name for name in self._attributes.keys() | now.keys() if _differ(self._attributes, now, name)}
        self._attributes = {name: self._attributes.get(name, _MISSING) for name in names}
        self._contents = [(value, content) for value, content in self._contents if not holds(value, content)]

    def __enter__(self) -> None:
        if self._versions != _versions(self._held):
            raise PipelineError(
                "what is recomputed must find its inputs as they were",
                got=f"an input of a {type(self._module).__name__} that was changed in place since",
                fix=_FIX,
            )
        for name, (buffer, version) in self._found.items():
            if version_of(buffer) != version:
                raise PipelineError(
                    "what is recomputed must find the buffers that it only reads as they were",
                    got=f"{name} of a {type(self._module).__name__}, which was changed in place since",
                    fix=_FIX,
                )
        if self.drawn is not None:
            self._drawn_now = PythonRandom()
            self.drawn.put_back()
        now = _attributes(self._module) if self._attributes else {}
        self._attributes_now = {name: now.get(name, _MISSING) for name in self._attributes}
        _set_attributes(self._module, self._attributes)
        self._contents_now = [(value, copy.copy(value)) for value, _ in self._contents]
        for value, content in self._contents:
            refill(value, content)
        self._now = _buffers(self._module)
        _put(self._module, {name: buffer for name, (buffer, _) in self._found.items()} | _copies(self.values))

    def __exit__(self, *_: object) -> None:
        _put(self._module, self._now)
        self._now = {}
        for value, content in self._contents_now:
            refill(value, content)
        self._contents_now = []
        _set_attributes(self._module, self._attributes_now)
        self._attributes_now = {}
        if self._drawn_now is not None:
            self._drawn_now.put_back()


def _attributes(module: nn.Module) -> dict[_Name, Any]:
    """What a module, and those in it, have by name besides parameters, buffers and modules."""
    return {
        (index, name): value
        for index, each in enumerate(module.modules())
        for name, value in vars(each).items()
        if name not in _OF_TORCH
    }


def _differ(one: dict[_Name, Any], other: dict[_Name, Any], name: _Name) -> bool:
    return one.get(name, _MISSING) is not other.get(name, _MISSING)


def _set_attributes(module: nn.Module, values: dict[_Name, Any]) -> None:
    owners = list(module.modules()) if values else []
    for (index, name), value in values.items():
        if value is _MISSING:
            vars(owners[index]).pop(name, None)
        else:
            vars(owners[index])[name] = value


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    found = module.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in found if not buffer.is_inference()}


def _copies(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each; of one that has several names, one."""
    copies = {id(value): value.detach().clone() for value in values.values()}
    return {name: copies[id(value)] for name, value in values.items()}


def _put(module: nn.Module, values: dict[str, Tensor]) -> None:
    now = dict(module.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if now.get(name) is not value:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, value)


def _container(argument: Any) -> Any:
    return None if isinstance(argument, Tensor) else argument


def _tensors(tree: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _versions(tensors: list[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]
