"""Function modes and tensors without memory: what a stage needs to run a model's forward without most of its work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from sternway._torch.probe import probe


def without_subclasses() -> AbstractContextManager[Any]:
    """A block in which subclasses of Tensor are not asked; function modes still are."""
    return torch._C.DisableTorchFunctionSubclass()


def shell(
    kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of a subclass that has a shape, a dtype and a device, but no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def own_buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of modules, without those of the modules in them; it costs little."""
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def buffer_places(modules: Iterable[nn.Module]) -> list[dict[str, Tensor | None]]:
    """Where modules have their buffers, now and later."""
    return [module._buffers for module in modules]


def parameter_places(module: nn.Module) -> list[dict[str, nn.Parameter | None]]:
    """Where a module, and those in it, have their parameters, now and later."""
    return [each._parameters for each in module.modules()]


def buffers_by_name(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module, without those of the modules in it; None where one may be put later."""
    return dict(module._buffers)


def put_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Put a buffer into its place, which a module has or had."""
    module._buffers[name] = buffer


def take_buffer(module: nn.Module, name: str) -> None:
    """Remove a buffer. If it comes again, it is persistent or not as it was."""
    module._buffers.pop(name, None)


WHOLE_CALL = "_compiled_call_impl"
"""What a module calls in place of its forward and hooks, if it has such an attribute."""


def whole_call(module: nn.Module) -> Callable[..., Any]:
    """A module's forward together with its hooks."""
    return module._compiled_call_impl or module._call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: its forward and hooks are compiled as one."""
    return module._compiled_call_impl is not None


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for gradients of its inputs or outputs; it sets them up around its forward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def next_hook() -> int:
    """The number of the next hook of a module or tensor; they are counted up."""
    return RemovableHandle.next_id


def hooks_since(modules: Iterable[nn.Module], first: int) -> list[tuple[dict[int, Any], int]]:
    """The hooks that modules have got since ``next_hook()`` was ``first``: where they are, and as what."""
    if first == next_hook():
        return []
    places = [own for module in modules for name, own in vars(module).items() if name in _HOOKS]
    return [(place, number) for place in places for number in place if number >= first]


def computes_weights(module: nn.Module) -> bool:
    """Whether a hook before a module's forward makes its weight of parameters: norms and pruning of torch.nn.utils."""
    hooks = module._forward_pre_hooks
    return bool(hooks) and any(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks.values())


def uncompiled() -> AbstractContextManager[Any]:
    """A block in which compiled code runs as it was written. To trace it under another mode fails, or is wrong.

    If Dynamo is not imported, nothing is compiled.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Whether ``mode`` is the function mode that was entered last."""
    return torch.overrides._get_current_function_mode() is mode


@probe(
    "Tensor._make_wrapper_subclass, torch._C.DisableTorchFunctionSubclass",
    expected="make and read tensors without memory",
    features=("pipeline",),
)
def _shells() -> bool:
    class Shell(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError("asked")

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a static method
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise ValueError("computed")

    made = shell(Shell, (2, 3), torch.int8, torch.device("cpu"), False)
    with without_subclasses():
        return isinstance(made, Shell) and made.shape == (2, 3) and made.dtype is torch.int8


@probe("Module._buffers", expected="has a module's own buffers", features=("pipeline",))
def _buffers() -> bool:
    norm = nn.Sequential(nn.BatchNorm1d(2))
    norm.register_buffer("none", None)
    norm.register_buffer("own", torch.ones(1))
    names, found = buffers_by_name(norm), [id(buffer) for buffer in own_buffers([norm])]
    put_buffer(norm, "none", names["own"])
    take_buffer(norm, "own")
    places = [
        buffer is names["own"] for place in buffer_places([norm]) for buffer in place.values() if buffer is not None
    ]
    return (
        places == [True]
        and found == [id(names["own"])]
        and names.keys() == {"none", "own"}
        and buffers_by_name(norm).keys() == {"none"}
    )


@probe("Module._parameters", expected="has a module's own parameters", features=("pipeline",))
def _parameters() -> bool:
    inner = nn.Module()  # a layer would draw random numbers
    inner.weight = nn.Parameter(torch.ones(1))
    places, after = parameter_places(nn.Sequential(nn.Identity(), inner)), nn.Parameter(torch.ones(1))
    inner.weight = after  # in the same place
    found = [parameter for place in places for parameter in place.values() if parameter is not None]
    return len(found) == 1 and found[0] is after


@probe(
    "Module._compiled_call_impl, Module._call_impl",
    expected="are called in place of a module's forward and hooks, and call them",
    features=("pipeline",),
)
def _whole_calls() -> bool:
    module = nn.Identity()
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    inner = whole_call(module)
    vars(module)[WHOLE_CALL] = lambda x: 10 * inner(x)
    try:
        is_ten_times = int(module(torch.ones(()))) == 20 and inner == module._call_impl
        return is_ten_times and is_compiled(module) and not is_compiled(nn.Identity())
    finally:
        del vars(module)[WHOLE_CALL]


@probe(
    "Module._backward_hooks, Module._backward_pre_hooks",
    expected="have a module's hooks for gradients",
    features=("pipeline",),
)
def _gradient_hooks() -> bool:
    hooked = nn.Identity(), nn.Identity()
    hooked[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    hooked[1].register_full_backward_pre_hook(lambda module, outputs: None)
    return all(map(has_backward_hooks, hooked)) and not has_backward_hooks(nn.Identity())


@probe(
    "Module._forward_hooks, …", expected="have hooks by numbers, which are counted up", features=("pipeline",), hooks=2
)
def _numbered_hooks() -> bool:
    module, first = nn.Identity(), next_hook()
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    module.register_forward_pre_hook(lambda module, inputs, keywords: None, with_kwargs=True)
    for place, number in hooks_since([module], first):
        del place[number]
    return int(module(torch.zeros(()))) == 0 and next_hook() == first + 2 and not hooks_since([module], first)


@probe("Module._forward_pre_hooks", expected="has hooks of torch.nn.utils", features=("pipeline",))
def _weight_hooks() -> bool:
    module = nn.Module()  # a norm would draw random numbers
    module.weight = nn.Parameter(torch.ones(1))
    before = computes_weights(module)
    prune.identity(module, "weight")
    return computes_weights(module) and not before


@probe("torch._dynamo", expected="is the module that compiles, if it is imported", features=("pipeline",))
def _dynamo() -> bool:
    # Looked at as code: to import it takes seconds.
    source = Path(torch.compiler.__file__).read_text()
    return "def set_stance(" in source and "import torch._dynamo" in source and '"force_eager"' in source


@probe("torch.overrides._get_current_function_mode", expected="is the innermost mode", features=("pipeline",))
def _innermost() -> bool:
    mode, other = TorchFunctionMode(), TorchFunctionMode()
    with mode:
        first = is_innermost(mode)
        with other:
            return first and not is_innermost(mode)
