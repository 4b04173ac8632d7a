"""Nodes that compute a weight's gradient: their kinds, and the fields that a rule of the split reads.

A field gives what the node saved, unpacked. Fields are read by ``attrgetter``, which costs no Python frame: the split
reads some for every matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sternway._torch.nodes import Field, signed
from sternway._torch.probe import probe


class Mm:
    """``left @ right``, two matrices."""

    name = "MmBackward0"
    left: Field = attrgetter("_saved_self")
    right: Field = attrgetter("_saved_mat2")
    strides: tuple[Field, ...] = (attrgetter("_saved_self_sym_strides"), attrgetter("_saved_mat2_sym_strides"))


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
    left_and_alpha: Field = attrgetter("_saved_mat1", "_saved_alpha")
    alpha: Field = attrgetter("_saved_alpha")
    beta: Field = attrgetter("_saved_beta")
    strides: tuple[Field, ...] = (attrgetter("_saved_mat1_sym_strides"), attrgetter("_saved_mat2_sym_strides"))


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


class EmbeddingBag:
    """Sums, means or maxima of rows of a table."""

    name = "EmbeddingBagBackward0"
    indices: Field = attrgetter("_saved_indices")
    bags: Field = attrgetter("_saved_offsets", "_saved_result1", "_saved_result2", "_saved_result3")
    """Where each bag begins, which bag each index is in, the sizes of the bags, and where the maxima are."""
    weights: Field = attrgetter("_saved_per_sample_weights")
    settings: Field = attrgetter(
        "_saved_weight_sym_argsize_0", "_saved_scale_grad_by_freq", "_saved_mode", "_saved_sparse"
    )
    padding: Field = attrgetter("_saved_padding_idx")


def strides_of_side(node: Any, position: int) -> tuple[int, ...]:
    """The strides of a side of a product of two matrices, by its place among the node's edges; () of other nodes."""
    match type(node).__name__:
        case Mm.name:
            return tuple(Mm.strides[position](node))
        case Addmm.name if position:
            return tuple(Addmm.strides[position - 1](node))
    return ()


def lies_by_columns(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether autograd computes the gradient of such a side by columns: as the transpose of another product."""
    return len(shape) == len(strides) == 2 and strides[0] == 1 and strides[1] == shape[0]


def embedding_bag_backward(grad: Tensor, indices: Tensor, bags: Any, settings: Any, weights: Any, pad: int) -> Tensor:
    """The gradient of the table."""
    table: Tensor = torch.ops.aten._embedding_bag_backward(grad, indices, *bags, *settings, weights, signed(pad))
    return table


def _matrix(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def _leaves(node: Any) -> list[Any]:
    return [child.variable for child, _ in node.next_functions]


@probe(
    "MmBackward0: _saved_self, _saved_mat2, _saved_self_sym_strides, …",
    expected="are the two sides of a product and their strides",
    features=("split",),
)
def _mm() -> bool:
    left, right = _matrix(2, 3), _matrix(3, 4)
    node: Any = (left @ right).grad_fn
    sides, strides = [Mm.left(node), Mm.right(node)], [strides_of_side(node, 0), strides_of_side(node, 1)]
    is_kind = type(node).__name__ == Mm.name and strides == [(3, 1), (4, 1)]
    return is_kind and sides == _leaves(node) == [left, right]


@probe("BmmBackward0: _saved_self, _saved_mat2", expected="are the two sides of a product", features=("split",))
def _bmm() -> bool:
    left, right = _matrix(2, 2, 3), _matrix(2, 3, 4)
    node: Any = torch.bmm(left, right).grad_fn
    sides = [Bmm.left(node), Bmm.right(node)]
    return type(node).__name__ == Bmm.name and sides == _leaves(node) == [left, right]


@probe(
    "AddmmBackward0: _saved_mat1, _saved_mat2, _saved_alpha, _saved_beta, _saved_mat1_sym_strides, …",
    expected="are the sides of a product, its factors and the sides' strides",
    features=("split",),
)
def _addmm() -> bool:
    bias, left, right = _matrix(4), _matrix(2, 3), _matrix(3, 4)
    node: Any = torch.addmm(bias, left, right, alpha=2, beta=3).grad_fn
    fields = [Addmm.left(node), Addmm.right(node), Addmm.alpha(node), Addmm.beta(node)]
    is_kind = type(node).__name__ == Addmm.name and [strides_of_side(node, at) for at in (1, 2)] == [(3, 1), (4, 1)]
    return is_kind and fields == [left, right, 2, 3] and _leaves(node) == [bias, left, right]


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
    "EmbeddingBagBackward0: _saved_indices, _saved_offsets, …; aten._embedding_bag_backward",
    expected="are what aten._embedding_bag_backward takes",
    features=("split",),
)
def _embedding_bag() -> bool:
    table, indices, offsets = _matrix(4, 2), torch.tensor([1, 3, 1]), torch.tensor([0, 2])
    node: Any = functional.embedding_bag(indices, table, offsets, mode="mean", padding_idx=3).grad_fn
    grad = torch.ones(2, 2)
    bags, settings, padding = EmbeddingBag.bags(node), EmbeddingBag.settings(node), EmbeddingBag.padding(node)
    ours = embedding_bag_backward(grad, EmbeddingBag.indices(node), bags, settings, EmbeddingBag.weights(node), padding)
    is_kind = type(node).__name__ == EmbeddingBag.name and node.next_functions[0][0].variable is table
    return is_kind and signed(padding) == 3 and torch.equal(ours, node(grad)[0])
