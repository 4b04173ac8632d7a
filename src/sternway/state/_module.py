"""Backward hooks of modules: one call with the gradients of a module's outputs and inputs.

The outputs and the inputs are shown to two hooks. The first keeps the gradients of the outputs until the second has
those of the inputs and calls the user's function with both. Each run of the module has one list that both use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sternway.errors import StateError

ModuleHook = Callable[[nn.Module, tuple[Tensor | None, ...], tuple[Tensor | None, ...]], Any]
Show = Callable[[list[Tensor], Callable[[Any], Any]], list[Tensor]]


class Watched:
    """The two forward hooks that show a module's gradients."""

    def __init__(self, show: Show, fn: ModuleHook) -> None:
        self.show, self.fn = show, fn
        self.open: list[tuple[list[Any], tuple[int, ...], int]] = []  # the runs of the module that are under way

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        places = _tensors(args) if torch.is_grad_enabled() else ()
        run: list[Any] = []
        self.open.append((run, places, len(args)))
        if not places:
            return None
        shown = self.show([args[place] for place in places], partial(_inputs, self.fn, module, run, places, len(args)))
        return _put(args, places, shown)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        run, inputs, number = self.open.pop()
        outputs = (output,) if isinstance(output, Tensor) else output
        if not isinstance(outputs, tuple):
            raise StateError(
                "a module with a hook must return a tensor or a tuple",
                got=f"a {type(output).__name__} from {type(module).__name__}",
                fix="put on_grad on the tensors that matter, inside the module or after it",
            )
        places = _tensors(outputs) if torch.is_grad_enabled() else ()
        if not places:
            return None
        if inputs:
            hook = partial(_outputs, run, places, len(outputs))
        else:
            hook = partial(_outputs_alone, self.fn, module, number, places, len(outputs))
        shown = _put(outputs, places, self.show([outputs[place] for place in places], hook))
        return shown[0] if isinstance(output, Tensor) else shown


def watch(module: nn.Module, show: Show, fn: ModuleHook) -> RemovableHandle:
    """Call ``fn`` in the backward of ``module``, until the handle is removed."""
    watched = Watched(show, fn)
    return _Both(module.register_forward_pre_hook(watched.before), module.register_forward_hook(watched.after))


class _Both(RemovableHandle):
    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _tensors(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(place for place, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad)


def _put(values: tuple[Any, ...], places: tuple[int, ...], shown: list[Tensor]) -> tuple[Any, ...]:
    put = list(values)
    for place, tensor in zip(places, shown, strict=True):
        put[place] = tensor
    return tuple(put)


# In the backward. ``came`` is the one gradient, or those of several tensors by their number.


def _full(came: Any, places: tuple[int, ...], number: int) -> tuple[Tensor | None, ...]:
    by_number = {0: came} if isinstance(came, Tensor) else came
    full: list[Tensor | None] = [None] * number
    for index, grad in by_number.items():
        full[places[index]] = grad
    return tuple(full)


def _outputs(run: list[Any], places: tuple[int, ...], number: int, came: Any) -> None:
    run[:] = [_full(came, places, number)]


def _inputs(fn: ModuleHook, module: nn.Module, run: list[Any], places: tuple[int, ...], number: int, came: Any) -> Any:
    (grad_output,) = run
    run.clear()
    returned = fn(module, _full(came, places, number), grad_output)
    if returned is None:
        return None
    grads = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if len(grads) != number:
        raise StateError(
            "a module's hook must return None or one gradient for each input",
            got=f"{len(grads)} for {number}",
            fix="return a tuple as long as grad_input, with None where nothing changes",
        )
    return grads[places[0]] if isinstance(came, Tensor) else {i: grads[place] for i, place in enumerate(places)}


def _outputs_alone(
    fn: ModuleHook, module: nn.Module, inputs: int, places: tuple[int, ...], number: int, came: Any
) -> None:
    fn(module, (None,) * inputs, _full(came, places, number))
