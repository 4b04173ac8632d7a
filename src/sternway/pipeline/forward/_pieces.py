"""Which modules are the pieces that a model is cut between?

Those that the model's forward calls, and that have parameters or running statistics. Containers are looked into. A
piece is entered, so that the modules that it calls are pieces in its place, if there are too few pieces, or if it is
too large a part of the model and is not one of several like layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sternway._torch.modes import is_compiled
from sternway.errors import PipelineError
from sternway.pipeline.forward._follow import Interceptor
from sternway.pipeline.forward._untouched import untouched


class Outline:
    """A model's modules as candidates for pieces.

    Args:
        model: the whole model.
        called: the names of the modules that its forward calls, in order; None if that is not known. Then modules are
            taken in the order in which the model has them.
    """

    def __init__(self, model: nn.Module, called: Sequence[str] | None = None) -> None:
        self._modules = dict(model.named_modules())
        self._order = {name: place for place, name in enumerate(self._modules if called is None else called)}
        self._called = None if called is None else set(called)

    def pieces(self, wanted: int, named: Sequence[str] = ()) -> list[str]:
        """At least ``wanted`` pieces, if there are as many, with those that are ``named`` among them."""
        pieces = self._inside("", named)
        for name in named:
            if name not in self._modules or not self._is_called(name):
                near = ", ".join(pieces[:12]) + (", …" if len(pieces) > 12 else "")
                raise PipelineError(
                    "a cut must name a module that the forward calls", got=repr(name), fix=f"choose from {near}"
                )
            while name not in pieces:
                outer = max((piece for piece in pieces if name.startswith(f"{piece}.")), key=len, default=None)
                if outer is None:
                    pieces.append(name)  # it has no parameters, so it is no piece by itself
                else:
                    pieces = [*(p for p in pieces if p != outer), *self._inside(outer, named)]
        fixed = {name for name in named if name in pieces}
        while (largest := self._to_enter(pieces, wanted, fixed)) is not None:
            pieces = [*(p for p in pieces if p != largest), *self._inside(largest, named)]
        return sorted(pieces, key=self._order.__getitem__)

    def _to_enter(self, pieces: list[str], wanted: int, fixed: set[str]) -> str | None:
        weights = {name: weight(self._modules[name]) for name in pieces}
        limit = sum(weights.values()) / (2 * wanted)
        candidates = [name for name in pieces if name not in fixed and self._inside(name)]
        if len(pieces) >= wanted:
            candidates = [name for name in candidates if weights[name] > limit and not self._has_twin(name, pieces)]
        return max(candidates, key=weights.__getitem__, default=None)

    def _has_twin(self, name: str, pieces: list[str]) -> bool:
        """Whether the piece is one of several layers of one kind."""
        holder, kind = name.rpartition(".")[0], type(self._modules[name])
        return _is_container(self._modules[holder]) and any(
            other != name and other.rpartition(".")[0] == holder and type(self._modules[other]) is kind
            for other in pieces
        )

    def _inside(self, name: str, named: Sequence[str] = ()) -> list[str]:
        """The pieces inside a module."""
        module = self._modules[name]
        wrapped = "_orig_mod" in dict(module.named_children())  # by torch.compile
        if isinstance(module, torch.jit.ScriptModule) or wrapped or is_compiled(module):
            return []  # what runs inside is not Python
        found = []
        for child, inner in module.named_children():
            full = f"{name}.{child}" if name else child
            if full not in self._modules:  # another name of a module that is somewhere else too
                continue
            is_piece = not _is_container(inner) or (_is_container(module) and self._has_twin(full, self._beside(full)))
            if full in named or (self._is_called(full) and is_piece):
                if full in named or _has_state(inner):
                    found.append(full)
            else:
                found += self._inside(full, named)
        return found

    def _beside(self, name: str) -> list[str]:
        holder = name.rpartition(".")[0]
        found = (f"{holder}.{child}" if holder else child for child, _ in self._modules[holder].named_children())
        return [each for each in found if each in self._modules]

    def _is_called(self, name: str) -> bool:
        return self._called is None or name in self._called


def _is_container(module: nn.Module) -> bool:
    plain = type(module).forward in (nn.Sequential.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) and plain


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(hasattr(each, "running_mean") for each in module.modules())


def weight(module: nn.Module) -> float:
    """A rough cost of a module without running it: its parameters, except embedding tables, which are looked up."""
    tables = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
    return float(sum(p.numel() for p in module.parameters()) - tables)


def called_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of all modules that a forward calls, in order, each once."""
    called: dict[str, None] = {}

    def call(name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        called.setdefault(name)
        return forward(*args, **kwargs)

    modules = {name: m for name, m in model.named_modules() if name and not isinstance(m, torch.jit.ScriptModule)}
    for name in [name for name, module in modules.items() if is_compiled(module)]:  # nobody sees what it calls
        modules = {each: module for each, module in modules.items() if not each.startswith(f"{name}.")}
    with untouched(model), torch.no_grad(), Interceptor(modules).passing_to(call):
        model(*args, **kwargs)
    return list(called)
