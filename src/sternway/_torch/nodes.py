"""Nodes of an autograd graph: their kinds, and the tensors that they save.

A node that saved an operand ``x`` has two attributes for it. ``_saved_x`` gives the tensor, and runs the unpack hook if
there is one. ``_raw_saved_x`` gives a ``SavedTensor`` without unpacking: its ``data`` is the tensor, or what a pack
hook returned for it, or None once a backward has freed it; its ``unpack_hook`` is the hook, or None. A node with a list
of tensors has a tuple there; a custom ``autograd.Function`` has ``saved_tensors`` and ``_raw_saved_tensors``.

Fields are read by ``attrgetter``, which costs no Python frame: the split reads some for every matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.utils import checkpoint

from sternway._torch.probe import probe

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


class Mm:
    """``left @ right``, two matrices."""

    name = "MmBackward0"
    left: Field = attrgetter("_saved_self")
    right: Field = attrgetter("_saved_mat2")


class Bmm:
    """``left @ right``, two stacks of matrices."""

    name = "BmmBackward0"
    left: Field = attrgetter("_saved_self")
    right: Field = attrgetter("_saved_mat2")


class Addmm:
    """``beta * bias + alpha * left @ right``: ``nn.Linear`` with a bias."""

    name = "AddmmBackward0"
    left: Field = attrgetter("_saved_mat1")
    right: Field = attrgetter("_saved_mat2")
    alpha: Field = attrgetter("_saved_alpha")
    beta: Field = attrgetter("_saved_beta")


class Baddbmm:
    """``beta * bias + alpha * left @ right``, of stacks of matrices."""

    name = "BaddbmmBackward0"
    left: Field = attrgetter("_saved_batch1")
    right: Field = attrgetter("_saved_batch2")
    alpha: Field = attrgetter("_saved_alpha")
    beta: Field = attrgetter("_saved_beta")


class Convolution:
    """Convolutions, plain and transposed, in any number of dimensions."""

    name = "ConvolutionBackward0"
    input: Field = attrgetter("_saved_input")
    weight: Field = attrgetter("_saved_weight")
    settings: Field = attrgetter(
        "_saved_stride",
        "_saved_padding",
        "_saved_dilation",
        "_saved_transposed",
        "_saved_output_padding",
        "_saved_groups",
    )
    """As ``aten.convolution_backward`` takes them, after the tensors."""


class Embedding:
    """A lookup in a table."""

    name = "EmbeddingBackward0"
    indices: Field = attrgetter("_saved_indices")
    settings: Field = attrgetter(
        "_saved_weight_sym_argsize_0", "_saved_padding_idx", "_saved_scale_grad_by_freq", "_saved_sparse"
    )
    """As ``aten.embedding_backward`` takes them, after the tensors; ``padding_idx`` is to be made ``signed``."""


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
def _unpack_hooks(node_type: Hashable) -> tuple[Field, tuple[Any, ...]]:
    """A function that reads all the unpack hooks of a node at once, and what it returns where there are none."""
    # Two names at least, so that the getter returns a tuple however many tensors are saved.
    names = [f"{name}.unpack_hook" for name in saved_names(node_type)]
    return attrgetter("__class__", "__class__", *names), (node_type, node_type, *[None] * len(names))


def packed_by_hooks(node: Any) -> list[Any]:
    """What pack hooks returned for the node's saved tensors; nothing is unpacked."""
    read, none = _unpack_hooks(node.__class__)
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


class _MoreReads(dict[Any, Any]):
    """A holder's ``handles``, where marking the tensor as read is ignored the first few times."""

    def __init__(self, handles: dict[Any, Any], more: int) -> None:
        super().__init__(handles)
        self.more = more

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is None and self.more:
            self.more -= 1
        else:
            super().__setitem__(group, handle)


def allow_more_reads(holder: Any, times: int) -> None:
    """Let the tensor behind a ``CHECKPOINT_HOLDER`` be read more than once in a backward."""
    holder.handles = _MoreReads(holder.handles, times)


def _matrix(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def _leaves(node: Any) -> list[Any]:
    return [child.variable for child, _ in node.next_functions]


@probe("MmBackward0: _saved_self, _saved_mat2", expected="are the two sides of a product", features=("split",))
def _mm() -> bool:
    left, right = _matrix(2, 3), _matrix(3, 4)
    node: Any = (left @ right).grad_fn
    sides = [Mm.left(node), Mm.right(node)]
    return type(node).__name__ == Mm.name and sides == _leaves(node) == [left, right]


@probe("BmmBackward0: _saved_self, _saved_mat2", expected="are the two sides of a product", features=("split",))
def _bmm() -> bool:
    left, right = _matrix(2, 2, 3), _matrix(2, 3, 4)
    node: Any = torch.bmm(left, right).grad_fn
    sides = [Bmm.left(node), Bmm.right(node)]
    return type(node).__name__ == Bmm.name and sides == _leaves(node) == [left, right]


@probe(
    "AddmmBackward0: _saved_mat1, _saved_mat2, _saved_alpha, _saved_beta",
    expected="are the sides of a product and its factors",
    features=("split",),
)
def _addmm() -> bool:
    bias, left, right = _matrix(4), _matrix(2, 3), _matrix(3, 4)
    node: Any = torch.addmm(bias, left, right, alpha=2, beta=3).grad_fn
    fields = [Addmm.left(node), Addmm.right(node), Addmm.alpha(node), Addmm.beta(node)]
    return type(node).__name__ == Addmm.name and fields == [left, right, 2, 3] and _leaves(node) == [bias, left, right]


@probe(
    "BaddbmmBackward0: _saved_batch1, _saved_batch2, _saved_alpha, _saved_beta",
    expected="are the sides of a product and its factors",
    features=("split",),
)
def _baddbmm() -> bool:
    bias, left, right = _matrix(2, 2, 4), _matrix(2, 2, 3), _matrix(2, 3, 4)
    node: Any = torch.baddbmm(bias, left, right, alpha=2, beta=3).grad_fn
    fields = [Baddbmm.left(node), Baddbmm.right(node), Baddbmm.alpha(node), Baddbmm.beta(node)]
    is_kind = type(node).__name__ == Baddbmm.name
    return is_kind and fields == [left, right, 2, 3] and _leaves(node) == [bias, left, right]


@probe(
    "ConvolutionBackward0: _saved_input, _saved_weight, _saved_stride, …",
    expected="are what aten.convolution_backward takes",
    features=("split",),
)
def _convolution() -> bool:
    image, weight, bias = _matrix(1, 2, 5), _matrix(4, 1, 3), _matrix(4)
    node: Any = functional.conv1d(image, weight, bias, stride=2, padding=1, groups=2).grad_fn
    grad = torch.ones(1, 4, 3)
    saved = (Convolution.input(node), Convolution.weight(node))
    settings = Convolution.settings(node)
    ours = torch.ops.aten.convolution_backward(grad, *saved, None, *settings, (False, True, False))[1]
    leaves = _leaves(node)
    return (
        type(node).__name__ == Convolution.name
        and saved[0] is image
        and leaves == [image, weight, bias]
        and torch.equal(ours, node(grad)[1])
    )


@probe(
    "EmbeddingBackward0: _saved_indices, _saved_weight_sym_argsize_0, …",
    expected="are what aten.embedding_backward takes",
    features=("split",),
)
def _embedding() -> bool:
    table, indices = _matrix(4, 2), torch.tensor([1, 3, 1])
    node: Any = functional.embedding(indices, table, padding_idx=3).grad_fn
    rows, padding, by_frequency, sparse = Embedding.settings(node)
    grad = torch.ones(3, 2)
    ours = torch.ops.aten.embedding_backward(grad, Embedding.indices(node), rows, signed(padding), by_frequency, sparse)
    unpadded: Any = functional.embedding(indices, table).grad_fn
    return (
        type(node).__name__ == Embedding.name
        and _leaves(node) == [table]
        and signed(Embedding.settings(unpadded)[1]) == -1
        and torch.equal(ours, node(grad))
    )


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
        read.extend([Mm.left(node), Mm.left(node)])

    node.register_prehook(twice)
    output.sum().backward()
    is_holder = len(holders) == 2 and all(isinstance(holder, CHECKPOINT_HOLDER) for holder in holders)
    return is_holder and all(torch.equal(tensor, left) for tensor in read) and left.grad is not None
