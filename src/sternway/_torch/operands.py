"""Nodes that compute a weight's gradient: their kinds, and the fields that a rule of the split reads.

A field gives what the node saved, unpacked. Fields are read by ``attrgetter``, which costs no Python frame: the split
reads some for every matrix product.
"""

from __future__ import annotations

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


class Mv:
    """``matrix @ vector``."""

    name = "MvBackward0"
    matrix: Field = attrgetter("_saved_self")
    vector: Field = attrgetter("_saved_vec")


class Addmv:
    """``beta * bias + alpha * matrix @ vector``."""

    name = "AddmvBackward0"
    matrix: Field = attrgetter("_saved_mat")
    vector: Field = attrgetter("_saved_vec")
    alpha: Field = attrgetter("_saved_alpha")
    beta: Field = attrgetter("_saved_beta")


class Addbmm:
    """``beta * bias + alpha *`` the sum of the products of two stacks of matrices."""

    name = "AddbmmBackward0"
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


class GroupedMm:
    """One matrix product for each group of rows: the experts of a mixture, ``torch.nn.functional.grouped_mm``."""

    name = "GroupedMmBackward0"
    left: Field = attrgetter("_saved_self")
    right: Field = attrgetter("_saved_mat2")
    ends: Field = attrgetter("_saved_offs")
    """Where each group ends; None where the sides are stacks."""
    left_strides: Field = attrgetter("_saved_self_sym_strides")
    right_strides: Field = attrgetter("_saved_mat2_sym_strides")


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """One matrix product for each group."""
    return torch._grouped_mm(left, right, ends)


class Trilinear:
    """A sum over products of three tensors: ``nn.Bilinear``, with its weight in the middle."""

    name = "TrilinearBackward0"
    first: Field = attrgetter("_saved_i1")
    third: Field = attrgetter("_saved_i3")
    settings: Field = attrgetter("_saved_expand1", "_saved_sumdim", "_saved_expand3", "_saved_expand2")
    """As ``trilinear`` takes them for the gradient of the tensor in the middle, with the output's in its place."""


def trilinear(first: Tensor, second: Tensor, third: Tensor, *settings: Any) -> Tensor:
    """The sum over products of three tensors."""
    return torch._trilinear(first, second, third, *settings)


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


def embedding_bag_backward(grad: Tensor, indices: Tensor, bags: Any, settings: Any, weights: Any, pad: int) -> Tensor:
    """The gradient of the table."""
    table: Tensor = torch.ops.aten._embedding_bag_backward(grad, indices, *bags, *settings, weights, signed(pad))
    return table


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


@probe("MvBackward0: _saved_self, _saved_vec", expected="are a matrix and a vector", features=("split",))
def _mv() -> bool:
    matrix, vector = _matrix(2, 3), _matrix(3)
    node: Any = torch.mv(matrix, vector).grad_fn
    sides = [Mv.matrix(node), Mv.vector(node)]
    return type(node).__name__ == Mv.name and sides == _leaves(node) == [matrix, vector]


@probe(
    "AddmvBackward0: _saved_mat, _saved_vec, _saved_alpha, _saved_beta",
    expected="are a matrix, a vector and their factors",
    features=("split",),
)
def _addmv() -> bool:
    bias, matrix, vector = _matrix(2), _matrix(2, 3), _matrix(3)
    node: Any = torch.addmv(bias, matrix, vector, alpha=2, beta=3).grad_fn
    fields = [Addmv.matrix(node), Addmv.vector(node), Addmv.alpha(node), Addmv.beta(node)]
    is_kind = type(node).__name__ == Addmv.name
    return is_kind and fields == [matrix, vector, 2, 3] and _leaves(node) == [bias, matrix, vector]


@probe(
    "AddbmmBackward0: _saved_batch1, _saved_batch2, _saved_alpha, _saved_beta",
    expected="are the sides of products and their factors",
    features=("split",),
)
def _addbmm() -> bool:
    bias, left, right = _matrix(2, 4), _matrix(2, 2, 3), _matrix(2, 3, 4)
    node: Any = torch.addbmm(bias, left, right, alpha=2, beta=3).grad_fn
    fields = [Addbmm.left(node), Addbmm.right(node), Addbmm.alpha(node), Addbmm.beta(node)]
    is_kind = type(node).__name__ == Addbmm.name
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
    "GroupedMmBackward0: _saved_self, _saved_mat2, _saved_offs, _saved_mat2_sym_strides; torch._grouped_mm",
    expected="are the sides of one product for each group, which computes their gradients too",
    features=("split",),
)
def _grouped() -> bool:
    left = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    right = torch.ones(2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    try:
        output = grouped_mm(left, right, ends)
    except (AttributeError, NotImplementedError, RuntimeError):
        return True  # a torch that has it on GPUs alone, or not at all
    node: Any = output.grad_fn
    grad = torch.ones(8, 8, dtype=torch.bfloat16)
    sides = [GroupedMm.left(node), GroupedMm.right(node)]
    strides = [tuple(GroupedMm.left_strides(node)), tuple(GroupedMm.right_strides(node))]
    return (
        type(node).__name__ == GroupedMm.name
        and _leaves(node) == sides == [left, right]
        and torch.equal(GroupedMm.ends(node), ends)
        and strides == [(16, 1), (128, 8, 1)]
        and torch.equal(grouped_mm(left.detach().mT, grad, ends), node(grad)[1])
    )


@probe(
    "TrilinearBackward0: _saved_i1, _saved_i3, _saved_expand1, …; torch._trilinear",
    expected="are the tensors beside the one in the middle, whose gradient is such a sum too",
    features=("split",),
)
def _trilinear() -> bool:
    layer = torch.nn.utils.skip_init(torch.nn.Bilinear, 3, 4, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    first, third = _matrix(5, 3), _matrix(5, 4)
    node: Any = functional.bilinear(first, third, layer.weight).grad_fn
    while type(node).__name__ != Trilinear.name:  # a view comes after it
        node = node.next_functions[0][0]
    grad = torch.ones(5, 2)
    ours = trilinear(Trilinear.first(node), grad, Trilinear.third(node), *Trilinear.settings(node))
    return node.next_functions[1][0].variable is layer.weight and torch.equal(ours, node(grad)[1])


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
