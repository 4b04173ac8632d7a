"""Nodes of products other than those of two matrices, and the fields that a rule of the split reads.

See ``operands`` for the others.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sternway._torch.nodes import Field
from sternway._torch.operands import _leaves, _matrix
from sternway._torch.probe import probe


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
