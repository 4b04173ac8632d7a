"""``BackwardState``, which users hold and Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sternway._torch import require
from sternway.errors import EmptyStateError, StateError
from sternway.state import _module
from sternway.state._load import CapturedMark, Hook, Wire, running
from sternway.state._node import show_eager, show_traced
from sternway.state._ops import MADE, READ, WRITTEN


class BackwardState:
    """Carries hooks and values from a forward into its backward, compiled or not; compiled autograd is not needed.

    Example:
        >>> state = BackwardState()
        >>> def forward(x):                                  # or under torch.compile
        ...     return state.on_grad(2 * x, lambda grad: grad * state.scale).sum()
        >>> x = torch.ones(2, requires_grad=True)
        >>> loss = forward(x)
        >>> state.scale = 10.0
        >>> loss.backward()
        >>> x.grad
        tensor([20., 20.])

    **Values** are attributes of any kind. They are set after the forward and read in the backward, by hooks, or after
    it; reading earlier is an error. A value is set for every forward since the last time values were set or a backward
    ran, and for no other: with several forwards in flight, each hook sees the values of its own.

    **Lifetime.** The forward's graph keeps the state alive, and frees it. ``close()`` ends it at once.

    A copy of a state, by ``copy`` or ``pickle``, is a new and empty one.
    """

    _wire: Wire

    def __init__(self) -> None:
        object.__setattr__(self, "_wire", Wire())
        if torch.compiler.is_dynamo_compiling():
            self._refuse(MADE)
        else:
            require("state")

    def on_grad(self, y: Tensor, *fns: Callable[[Tensor], Any]) -> Tensor:
        """Call each of ``fns`` with the gradient that arrives at the returned tensor, in order.

        Example:
            >>> norms = []
            >>> x = torch.ones(4, requires_grad=True)
            >>> y = BackwardState().on_grad(3 * x, lambda grad: norms.append(grad.norm().item()))
            >>> y.sum().backward()
            >>> norms
            [2.0]

        Args:
            y: a tensor that requires a gradient.
            fns: called as ``fn(grad)`` in every backward. If one returns a tensor, that replaces the gradient. They may
                do anything: keep the gradient, print, append, raise.

        Returns:
            ``y``, to be used in its place. Passed to ``on_grad`` again, it gets more functions, called after these.

        Where gradients are disabled this does nothing.

        Raises:
            StateError: ``y`` requires no gradient; the state is in use by another graph, or closed.
        """
        if len(fns) == 0 or not torch.is_grad_enabled():  # `not fns` would make Dynamo guard on each of them
            return y
        (shown,) = self._show([y], fns, again=True)
        return shown

    def on_module(self, module: nn.Module, fn: _module.ModuleHook) -> RemovableHandle:
        """Call ``fn(module, grad_input, grad_output)`` in every backward of ``module``, as a full backward hook.

        Example:
            >>> layer = torch.nn.Linear(2, 3)
            >>> state = BackwardState()
            >>> handle = state.on_module(layer, lambda module, grad_input, grad_output: print(grad_output))
            >>> layer(torch.ones(1, 2)).sum().backward()
            (tensor([[1., 1., 1.]]),)
            >>> handle.remove()

        Args:
            module: compiled, part of something compiled, or neither. It must return a tensor or a tuple.
            fn: gets two tuples, with None for what is no tensor or needs no gradient; may return other gradients for
                the inputs.

        Returns:
            A handle that removes the hook from the module, for later forwards.
        """
        return _module.watch(module, lambda tensors, hook: self._show(tensors, [hook], again=False), fn)

    def _show(self, tensors: list[Tensor], fns: Sequence[Hook], *, again: bool) -> list[Tensor]:
        show = show_traced if torch.compiler.is_dynamo_compiling() else show_eager
        return show(self._wire, tensors, fns, again=again)

    def _refuse(self, refusal: int) -> Tensor:
        self._wire.key = torch.ops.sternway.state_refuse(self._wire.key, refusal)
        return self._wire.key

    def remove(self, fn: Callable[..., Any] | None = None) -> None:
        """Stop calling ``fn``, or all functions, in the backwards of forwards that have already run.

        Example:
            >>> state, x = BackwardState(), torch.ones(1, requires_grad=True)
            >>> y = state.on_grad(2 * x, print)
            >>> state.remove(print)
            >>> y.sum().backward()

        Raises:
            StateError: ``fn`` is not among them.
        """
        wire = self._wire
        wire.settle()
        found = False
        for mark in list(wire.marks.values()):
            if isinstance(mark, CapturedMark):  # of forwards to come
                continue
            kept = [each for each in mark.fns if fn is not None and each != fn]
            found = found or len(kept) < len(mark.fns)
            mark.fns[:] = kept
        if fn is not None and not found:
            raise StateError(
                "fn must be a function that was passed to on_grad and waits for a gradient",
                got=repr(fn),
                fix="keep the function that you pass to on_grad; if its graph is gone there is nothing to remove",
            )

    def close(self) -> None:
        """Free hooks and values; a backward that still needs them raises ``StateError``."""
        self._wire.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_wire":
            raise AttributeError(name)  # copy and pickle ask for these
        if torch.compiler.is_dynamo_compiling():
            return self._refuse(READ)
        load = running(self._wire) or self._wire.load
        if load is None or load.phase != "backward":
            raise EmptyStateError("a value cannot be read before the backward", got=f".{name}", fix=_FIX)
        if name not in load.values:
            raise EmptyStateError("a value must be set before it is read", got=f".{name} of this forward", fix=_FIX)
        return load.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._refuse(WRITTEN)
            return
        if hasattr(type(self), name) or name == "_wire":
            raise StateError("a value cannot have the name of a method", got=f".{name}", fix="choose another name")
        load = running(self._wire) or self._wire.fill()
        load.values[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del (running(self._wire) or self._wire.fill()).values[name]

    def __reduce__(self) -> Any:
        return (BackwardState, ())

    def __repr__(self) -> str:
        return f"BackwardState({self._wire.describe()})"


_FIX = "set values between the forward and its backward, and read them in a hook"
