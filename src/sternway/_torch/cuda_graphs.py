"""What of a module the replay of a CUDA graph would not run, and parameters that stand in for others.

A replay runs kernels and no Python. So the capture of a module must know what Python would do: hooks, attributes that
the forward changes, parameters that were replaced since. Modules are asked on every call, so it is read off their own
dictionaries, without ``named_parameters``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from sternway._torch.probe import probe

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def all_modules(root: nn.Module) -> list[nn.Module]:
    """``root.modules()``, each once, in little time."""
    found, stack = {id(root): root}, [root]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


def held_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters and buffers of these modules themselves."""
    return [
        tensor
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for tensor in tensors.values()
        if tensor is not None
    ]


def own_names(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Of each module, what its attributes are now, parameters and buffers included."""
    return [{**module.__dict__, **module._parameters, **module._buffers} for module in modules]


def hooked_module(modules: Iterable[nn.Module]) -> nn.Module | None:
    """The first of the modules that runs hooks when it is called, if any; those for all modules count, too."""
    everywhere = nn_module._has_any_global_hook()
    return next((m for m in modules if everywhere or any(m.__dict__.get(name) for name in _HOOKS)), None)


def runs_compiled_code(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules was compiled by ``torch.compile`` or by its own ``compile()``, or says so."""
    return any(
        "_orig_mod" in m._modules
        or m.__dict__.get("_compiled_call_impl") is not None
        or getattr(type(m), "is_compiled", False)
        for m in modules
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Python code runs before or after a step of an optimizer."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks)


@contextmanager
def stand_ins(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> Iterator[dict[int, nn.Parameter]]:
    """A block in which the modules have other parameters in the place of these, with the same memory.

    A parameter's AccumulateGrad node belongs to the stream on which it was first used, for as long as a graph holds it.
    Other graphs may, while this block captures one on a stream of its own; a stand-in has a node of its own.

    Yields:
        The stand-ins, by the id of the parameter.
    """
    wanted = {id(parameter) for parameter in parameters}
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                if parameter is None or id(parameter) not in wanted:
                    continue
                twin = made.get(id(parameter))
                if twin is None:
                    twin = made[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                    twin.__dict__.update(parameter.__dict__)
                places.append((module, name, parameter))
                setattr(module, name, twin)  # recurrent layers keep lists of their weights, and see to them
        yield made
    finally:
        for module, name, parameter in reversed(places):
            setattr(module, name, parameter)


@probe(
    "Module._modules, Module._parameters, Module._buffers",
    expected="hold a module's parts by name",
    features=("split.capture",),
)
def _parts() -> bool:
    norm = nn.BatchNorm1d(2, device="meta")
    both = nn.Sequential(norm, nn.Sequential(norm), nn.ReLU())
    modules = all_modules(both)
    names = own_names([norm])[0]
    return (
        {id(each) for each in modules} == {id(each) for each in both.modules()}
        and {id(t) for t in held_tensors(modules)} == {id(t) for t in (*both.parameters(), *both.buffers())}
        and names["weight"] is norm.weight
        and names["running_mean"] is norm.running_mean
        and names["training"] is True
    )


@probe(
    "Module._forward_hooks and the like, torch.nn.modules.module._has_any_global_hook",
    expected="tell whether a module runs hooks when it is called",
    features=("split.capture",),
    hooks=4,
)
def _hooks() -> bool:
    def nothing(*_: Any) -> None:
        """A hook that is removed before it can run."""

    kinds = ["register_forward_pre_hook", "register_forward_hook"]
    kinds += ["register_full_backward_pre_hook", "register_full_backward_hook"]
    found = []
    for kind in kinds:
        layer = nn.Linear(1, 1, device="meta")
        before = hooked_module([layer])
        handle = getattr(layer, kind)(nothing)
        found.append(before is None and hooked_module([layer]) is layer)
        handle.remove()
        found.append(hooked_module([layer]) is None)
    return all(found)


@probe(
    "Optimizer._optimizer_step_pre_hooks, torch.optim.optimizer._global_optimizer_pre_hooks and the like",
    expected="tell whether a step runs hooks",
    features=("split.capture",),
    hooks=4,
)
def _step_hooks() -> bool:
    def nothing(*_: Any) -> None:
        """A hook that is removed before it can run."""

    optimizer = torch.optim.SGD([torch.empty(1, device="meta", requires_grad=True)], 0.1)
    kinds: list[Any] = [optimizer.register_step_pre_hook, optimizer.register_step_post_hook]
    kinds += [optim.register_optimizer_step_pre_hook, optim.register_optimizer_step_post_hook]
    found = []
    for register in kinds:
        handle = register(nothing)
        found.append(has_step_hooks(optimizer))
        handle.remove()
    return all(found) and not has_step_hooks(optimizer)


@probe(
    "OptimizedModule._orig_mod, Module._compiled_call_impl",
    expected="tell a compiled module from others",
    features=("split.capture",),
)
def _compiled() -> bool:
    layer = nn.ReLU()
    before = runs_compiled_code([layer])
    whole: Any = torch.compile(layer, backend="eager")
    layer.compile(backend="eager")
    return not before and runs_compiled_code([whole]) and runs_compiled_code([layer])
