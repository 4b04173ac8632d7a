"""One call of a custom Function's backward, which may be made for some of its inputs alone.

A backward is a function of the gradients that arrive, of what the forward saved, and of what it put on ``ctx`` by name.
``ctx.needs_input_grad`` says which gradients it is to compute. A ``BackwardCall`` has all of these, apart from the
node, so that the call can be made again when the engine has freed the node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sternway._storage import tensors_in
from sternway._torch.functions import attributes_of, backward_of, function_of, packed_values
from sternway._torch.nodes import allow_more_reads, packed_by_hooks
from sternway._torch.tensors import version_of
from sternway.errors import SplitError
from sternway.split._part import Node, Packing

Grads = tuple[Tensor | None, ...]
Flags = tuple[bool, ...]
Casting = tuple[tuple[str, bool, torch.dtype], ...]  # for each kind of device, whether autocast is on, and its dtype


class PartialContext(FunctionCtx):
    """Stands for the ``ctx`` of a backward that is called for some of its inputs alone."""

    __slots__ = ("needs_input_grad", "saved_tensors")  # apart from what the forward has put there by name

    needs_input_grad: Flags
    saved_tensors: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A call of a Function's backward.

    Attributes:
        function: the Function.
        needs: the flags of a whole call.
        grads: the gradients, as the backward gets them.
        saved: the saved tensors; none of them holds the graph.
        packed: the same as ``sternway.saved`` has packed them, or as they are.
        attributes: what the forward put on ``ctx`` by name.
        casting: the state of autocast in I.
        versions: how often each tensor had been changed in place.
    """

    function: Any
    needs: Flags
    grads: Grads
    saved: tuple[Tensor | None, ...]
    packed: tuple[Any, ...]
    attributes: dict[str, Any]
    casting: Casting
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, node: Node, grads: Grads, packing: Packing) -> BackwardCall:
        """The call that the engine is about to make. It reads what the node saved, once."""
        if packing == "checkpoint":
            for holder in packed_by_hooks(node):
                allow_more_reads(holder, times=1)
        saved = tuple([None if each is None else without_graph(each) for each in node.saved_tensors])
        packed = tuple(packed_values(node)) if packing == "ours" else saved
        named = {name: without_graph(value) for name, value in attributes_of(node).items()}
        call = cls(function_of(node), node.needs_input_grad, grads, saved, packed, named, casting_now(grads))
        return replace(call, versions=tuple(map(version_of, call.tensors())))

    def run(self, flags: Flags) -> Grads:
        """Call the backward for the inputs whose flags are set; one gradient, or None, for each input."""
        context = PartialContext()
        context.needs_input_grad, context.saved_tensors = flags, self.saved
        vars(context).update(self.attributes)
        with torch.no_grad(), _as_in_i(self):
            returned = backward_of(self.function)(context, *self.grads)
        return one_for_each(returned, self.function, self.needs)

    def tensors(self) -> list[Tensor]:
        """The tensors that it is made of."""
        return [each for each in (*self.grads, *self.saved, *self.named()) if each is not None]

    def named(self) -> list[Tensor]:
        """The tensors that the forward put on ``ctx`` by name."""
        return [tensor for value in self.attributes.values() for tensor in tensors_in(value)]

    @property
    def device(self) -> torch.device | None:
        """Where the gradients are."""
        return next((grad.device for grad in self.grads if grad is not None), None)

    def was_changed(self) -> bool:
        """Whether one of these was changed in place since."""
        return self.versions != tuple(map(version_of, self.tensors()))

    def form(self) -> Hashable:
        """What a call looks like, all but the numbers in its tensors: calls that look alike are treated alike."""
        tensors = tuple(map(_look, self.grads)), tuple(map(_look, self.saved))
        return (*tensors, _facts(self.attributes), self.casting)


def one_for_each(returned: Any, function: Any, needs: Flags) -> Grads:
    """What a backward returned, as a tuple with one entry for each input of the forward."""
    grads = returned if isinstance(returned, tuple) else (returned,)
    if len(grads) < len(needs) or any(grad is not None for grad in grads[len(needs) :]):
        raise SplitError(
            "a backward must return one gradient for each input of its forward",
            got=f"{len(grads)} from {function.__name__}, whose forward has {len(needs)} inputs",
            fix="return None in the place of each gradient that is not computed",
        )
    return grads[: len(needs)]


def without_graph(value: Any) -> Any:
    """A tensor that does not hold the graph which made it; any other value as it is."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value  # a parameter stays the object that it is
    return value.detach().requires_grad_(value.requires_grad)


def casting_now(grads: Grads) -> Casting:
    """The state of autocast, for the CPU and for the device of the gradients."""
    devices = dict.fromkeys(["cpu", *(grad.device.type for grad in grads if grad is not None)])
    return tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices)


@contextmanager
def _as_in_i(call: BackwardCall) -> Iterator[None]:
    """The device and the autocast that the engine has in I."""
    with ExitStack() as stack:
        if call.device is not None and call.device.type == "cuda":
            stack.enter_context(torch.cuda.device(call.device))
        if call.casting != casting_now(call.grads):
            for kind, enabled, dtype in call.casting:
                stack.enter_context(torch.autocast(kind, dtype if enabled else None, enabled))
        yield


def _look(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    is_dense = tensor.is_contiguous() if tensor.layout is torch.strided else None
    shape = None if tensor.is_nested else tuple(tensor.shape)
    return type(tensor), tensor.dtype, tensor.device, shape, tensor.layout, tensor.requires_grad, is_dense


def _facts(value: Any) -> Hashable:
    """Plain values as they are, tensors as they look, other objects as their type."""
    if isinstance(value, Tensor):
        return _look(value)
    if isinstance(value, tuple | list):
        return type(value), *map(_facts, value)
    if isinstance(value, dict):
        return tuple([(_facts(key), _facts(each)) for key, each in value.items()])
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | type):
        return type(value), value
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return value
    return type(value).__module__, type(value).__qualname__
