"""Nodes of an autograd graph: their kinds, and the tensors that they save.

A node that saved an operand ``x`` has two attributes for it. ``_saved_x`` gives the tensor, and runs the unpack hook if
there is one. ``_raw_saved_x`` gives a ``SavedTensor`` without unpacking: its ``data`` is the tensor, or what a pack
hook returned for it, or None once a backward has freed it; its ``unpack_hook`` is the hook, or None. A node with a list
of tensors has a tuple there; a custom ``autograd.Function`` has ``saved_tensors`` and ``_raw_saved_tensors``.

Fields are read by ``attrgetter``, which costs no Python frame: the split reads some for every matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from sternway._torch.probe import probe
from sternway._torch.saved_hooks import checkpoint_inputs, recomputed

Field = Callable[[Any], Any]
_RAW = "_raw_saved_"


class _Gone:
    """In the place of a type that this torch does not have; no object is of it."""


def _node_type(name: str) -> Any:  # Any: mypy would take a node of an unknown type for an object
    return getattr(getattr(torch._C, "_functions", None), name, _Gone)


# Types, not names: torch makes a type's name anew each time it is asked for.
ACCUMULATE_GRAD = _node_type("AccumulateGrad")  # of a leaf, which it has as `variable`
T = _node_type("TBackward0")  # tensor.t()
TRANSPOSE = _node_type("TransposeBackward0")
TO_COPY = _node_type("ToCopyBackward0")  # tensor.to(dtype)
CHECKPOINT_HOLDER: Any = getattr(checkpoint, "_Holder", _Gone)
"""What ``torch.utils.checkpoint`` packs a saved tensor as, where ``use_reentrant=False``."""

transposed_dims: Callable[[Any], tuple[int, int]] = attrgetter("_saved_dim0", "_saved_dim1")
"""Of a ``TRANSPOSE`` node, the two dimensions; see ``signed``."""


def signed(number: int) -> int:
    """A saved integer as it was passed: nodes show negative ones as unsigned 64-bit numbers."""
    return (number + 2**63) % 2**64 - 2**63


@cache
def saved_names(node_type: Hashable) -> tuple[str, ...]:
    """The attributes of a node type that hold saved tensors, still packed: its ``_raw_saved_…``."""
    return tuple(name for name in dir(node_type) if name.startswith(_RAW))


@cache
def saved_label(attribute: str) -> str:
    """The operand's name in a name that ``saved_names`` gives: ``"_raw_saved_self"`` is ``"self"``."""
    return attribute.removeprefix(_RAW)


raw_saved: Callable[[Any, str], Any] = getattr
"""``raw_saved(node, attribute)``: what one of ``saved_names`` holds, not unpacked: a ``SavedTensor``, a tuple of them,
or None. Raises AttributeError or RuntimeError where a backward has freed the node."""


def read_saved(node: Any, name: str) -> Any:
    """The saved operand ``name`` (as ``saved_label`` gives it), unpacked: hooks run.

    Raises RuntimeError where the tensor was freed, or changed in place.
    """
    if name == "tensors" and isinstance(node, BackwardCFunction):
        return node.saved_tensors
    return getattr(node, f"_saved_{name}")


def raw_data(node: Any, attribute: str) -> Any:
    """For an attribute ``_saved_…``, what is saved there, not unpacked; None for any other attribute."""
    if not attribute.startswith("_saved_"):
        return None
    return getattr(getattr(node, f"_raw{attribute}", None), "data", None)


@cache
def unpack_hooks(node_type: Hashable) -> tuple[Field, tuple[Any, ...]]:
    """A function that reads all the unpack hooks of a node at once, and what it returns where there are none.

    It raises AttributeError or RuntimeError where it cannot tell; ``packed_by_hooks`` can.
    """
    # Two names at least, so that the getter returns a tuple however many tensors are saved.
    names = [f"{name}.unpack_hook" for name in saved_names(node_type)]
    return attrgetter("__class__", "__class__", *names), (node_type, node_type, *[None] * len(names))


def packed_by_hooks(node: Any) -> list[Any]:
    """What pack hooks returned for the node's saved tensors; nothing is unpacked."""
    read, none = unpack_hooks(node.__class__)
    try:
        if read(node) == none:
            return []
    except (AttributeError, RuntimeError):  # one that is empty, a list of tensors, or a node that has run
        pass
    found: list[Any] = []
    for name in saved_names(node.__class__):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a custom Function that has run refuses, whether it saved anything or not
            continue
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved is not None and saved.unpack_hook is not None:
                found.append(saved.data)
    return found


def saved_parts(node: Any) -> Iterator[tuple[str, Any]]:
    """Each tensor that a node still keeps: the operand's name, and its ``SavedTensor``, not unpacked."""
    for attribute in saved_names(node.__class__):
        try:
            raw = raw_saved(node, attribute)
        except (RuntimeError, AttributeError):  # freed
            continue
        for part in raw if isinstance(raw, tuple | list) else (raw,):
            if part is not None and part.data is not None:
                yield saved_label(attribute), part


def held_by(node: Any) -> Iterator[Any]:
    """What a node holds, not unpacked: tensors, what pack hooks made of them, and attributes of a custom Function.

    Of a tensor in a checkpointed region, it is what the region keeps in order to recompute, and the recomputed tensor.
    """
    for _, part in saved_parts(node):
        if isinstance(part.data, CHECKPOINT_HOLDER):
            yield from recomputed(part.unpack_hook, part.data)
            inputs = checkpoint_inputs(part.unpack_hook)
            yield from inputs.values if inputs is not None else ()
        else:
            yield part.data
    if isinstance(node, BackwardCFunction):
        yield from node.__dict__.values()


class _MoreReads(dict[Any, Any]):
    """A holder's ``handles``, where marking the tensor as read is ignored the first few times."""

    __slots__ = ("more",)
    more: int

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is None and self.more:
            self.more -= 1
        else:
            super().__setitem__(group, handle)


def allow_more_reads(holder: Any, times: int) -> None:
    """Let the tensor behind a ``CHECKPOINT_HOLDER`` be read more than once in a backward."""
    handles = _MoreReads(holder.handles)
    handles.more = times
    holder.handles = handles


def _matrix(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


@probe(
    "torch._C._functions: TBackward0, TransposeBackward0, ToCopyBackward0, AccumulateGrad",
    expected="are the nodes between a weight and its matrix product",
    features=("split",),
)
def _between() -> bool:
    weight = _matrix(2, 3)
    t, cast = weight.t().grad_fn, weight.to(torch.float64).grad_fn
    swapped = _matrix(2, 3, 4).transpose(-2, -1).grad_fn
    leaf: Any = t.next_functions[0][0] if t is not None else None
    dims = [signed(dim) % 3 for dim in transposed_dims(swapped)]
    kinds = [type(node) for node in (t, swapped, cast, leaf)]
    return kinds == [T, TRANSPOSE, TO_COPY, ACCUMULATE_GRAD] and leaf.variable is weight and dims == [1, 2]


@probe(
    "_raw_saved_…: data, unpack_hook",
    expected="show what a node saved without unpacking it",
    features=("split", "graph"),
)
def _raw() -> bool:
    called: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[str, Tensor]:
        return "packed", tensor.detach()

    def unpack(packed: Any) -> Tensor:
        called.append(packed[1])
        return packed[1]

    tensor = _matrix(2)
    plain: Any = tensor.exp().grad_fn
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        hooked: Any = (tensor * tensor.detach()).grad_fn
    (name,) = saved_names(plain.__class__)
    raw = raw_saved(plain, name)
    (data,) = packed_by_hooks(hooked)
    shown = not called and packed_by_hooks(plain) == [] and raw.unpack_hook is None
    read = torch.equal(read_saved(plain, saved_label(name)), raw.data) and raw_data(plain, "_saved_result") is not None
    return shown and read and data[0] == "packed" and read_saved(hooked, "other").shape == (2,) and len(called) == 1


@probe(
    "_raw_saved_tensors, saved_tensors",
    expected="show what a custom autograd.Function saved",
    features=("split", "graph"),
)
def _raw_of_functions() -> bool:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    tensor = _matrix(2)
    output = Double.apply(tensor)  # in torch 2.11 the node dies with it
    node: Any = output.grad_fn
    (name,) = saved_names(node.__class__)
    (raw,) = raw_saved(node, name)
    return raw.data is tensor and read_saved(node, saved_label(name))[0] is tensor


@probe(
    "torch.utils.checkpoint._Holder",
    expected="is what a checkpoint packs a saved tensor as",
    features=("split", "graph"),
)
def _holder() -> bool:
    return CHECKPOINT_HOLDER().handles == {}


@probe(
    "torch.utils.checkpoint._Holder.handles",
    expected="marks a recomputed tensor as read, once in a backward",
    features=("split.checkpoint",),
    hooks=1,
)
def _holder_reads() -> bool:
    left, right = _matrix(2, 2), _matrix(2, 2)
    output = checkpoint.checkpoint(torch.mm, left, right, use_reentrant=False, preserve_rng_state=False)
    node: Any = output.grad_fn
    holders, read = packed_by_hooks(node), []

    def twice(grads: Any) -> None:
        for holder in holders:
            allow_more_reads(holder, 2)
        read.extend([read_saved(node, "self"), read_saved(node, "self")])

    node.register_prehook(twice)
    output.sum().backward()
    is_holder = len(holders) == 2 and all(isinstance(holder, CHECKPOINT_HOLDER) for holder in holders)
    return is_holder and all(torch.equal(tensor, left) for tensor in read) and left.grad is not None
