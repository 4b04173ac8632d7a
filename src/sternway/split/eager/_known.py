"""The rules for torch's own nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sternway._torch.nodes import signed
from sternway._torch.operands import (
    Addmm,
    Baddbmm,
    Bmm,
    Convolution,
    Embedding,
    EmbeddingBag,
    Mm,
    embedding_bag_backward,
)
from sternway._torch.products import Addbmm, Addmv, GroupedMm, Mv, Trilinear, grouped_mm, trilinear
from sternway.split._later import Later, Product
from sternway.split._rules import RULES, rule

aten = torch.ops.aten

# y = left @ right, for matrices (mm) and stacks of them (bmm).


@rule(Mm.name, 1)
def _mm_right(node: Any) -> Product:
    return Product(left=Mm.left(node))


@rule(Mm.name, 0, role="left")
def _mm_left(node: Any) -> Product:
    return Product(right=Mm.right(node))


@rule(Bmm.name, 1)
def _bmm_right(node: Any) -> Product:
    return Product(left=Bmm.left(node))


@rule(Bmm.name, 0, role="left")
def _bmm_left(node: Any) -> Product:
    return Product(right=Bmm.right(node))


# y = beta * bias + alpha * left @ right: Linear with a bias, and its stacked form.


@rule(Addmm.name, 2)
def _addmm_right(node: Any) -> Product:
    left, alpha = Addmm.left_and_alpha(node)
    return Product(left=left, scale=1 if alpha == 1 else alpha.conjugate())


@rule(Addmm.name, 1, role="left")
def _addmm_left(node: Any) -> Product:
    return Product(right=Addmm.right(node), scale=Addmm.alpha(node).conjugate())


@rule(Baddbmm.name, 2)
def _baddbmm_right(node: Any) -> Product:
    return Product(left=Baddbmm.left(node), scale=Baddbmm.alpha(node).conjugate())


@rule(Baddbmm.name, 1, role="left")
def _baddbmm_left(node: Any) -> Product:
    return Product(right=Baddbmm.right(node), scale=Baddbmm.alpha(node).conjugate())


@rule(Addmm.name, 0, role="bias")
def _addmm_bias(node: Any) -> Later | None:
    beta = Addmm.beta(node)
    return None if beta == 1 else _scaled(beta)


@rule(Baddbmm.name, 0, role="bias")
def _baddbmm_bias(node: Any) -> Later | None:
    beta = Baddbmm.beta(node)
    return None if beta == 1 else _scaled(beta)


# y = beta * bias + alpha * matrix @ vector.


@rule(Mv.name, 0)
def _mv_matrix(node: Any) -> Later:
    return Later(lambda grad, vector: torch.outer(grad, vector.conj()), Mv.vector(node))


@rule(Mv.name, 1, role="left")
def _mv_vector(node: Any) -> Later:
    return Later(lambda grad, matrix: matrix.mH.mv(grad), Mv.matrix(node))


@rule(Addmv.name, 1)
def _addmv_matrix(node: Any) -> Later:
    alpha = Addmv.alpha(node).conjugate()
    return Later(lambda grad, vector: torch.outer(grad, vector.conj()) * alpha, Addmv.vector(node))


@rule(Addmv.name, 2, role="left")
def _addmv_vector(node: Any) -> Later:
    alpha = Addmv.alpha(node).conjugate()
    return Later(lambda grad, matrix: matrix.mH.mv(grad) * alpha, Addmv.matrix(node))


@rule(Addmv.name, 0, role="bias")
def _addmv_bias(node: Any) -> Later | None:
    beta = Addmv.beta(node)
    return None if beta == 1 else _scaled(beta)


# y = beta * bias + alpha * the sum of left[i] @ right[i].


@rule(Addbmm.name, 2)
def _addbmm_right(node: Any) -> Later:
    alpha = Addbmm.alpha(node).conjugate()
    return Later(lambda grad, left: left.mH @ grad * alpha, Addbmm.left(node))


@rule(Addbmm.name, 1, role="left")
def _addbmm_left(node: Any) -> Later:
    alpha = Addbmm.alpha(node).conjugate()
    return Later(lambda grad, right: grad @ right.mH * alpha, Addbmm.right(node))


@rule(Addbmm.name, 0, role="bias")
def _addbmm_bias(node: Any) -> Later | None:
    beta = Addbmm.beta(node)
    return None if beta == 1 else _scaled(beta)


def _scaled(beta: complex) -> Later:
    return Later(lambda grad: grad * beta.conjugate())


@rule(Convolution.name, 1)
def _convolution_weight(node: Any) -> Later:
    return convolution_weight(Convolution.settings(node), Convolution.input(node), Convolution.weight(node))


def convolution_weight(settings: Sequence[Any], *kept: Tensor) -> Later:
    """The gradient of the weight of a convolution with these settings; its input and the weight are kept."""

    def compute(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # of the weight, only the shape matters
        _, value, _ = aten.convolution_backward(grad, x, weight, None, *settings, (False, True, False))
        return value  # type: ignore[no-any-return]  # torch.ops is untyped

    return Later(compute, *kept)


@rule(Convolution.name, 2, role="bias")
def _convolution_bias(node: Any) -> Later:
    return convolution_bias()


def convolution_bias() -> Later:
    """The gradient of the bias of a convolution."""

    def compute(grad: Tensor) -> Tensor:
        dense = grad.to_dense() if grad.is_mkldnn else grad
        return dense.sum([dim for dim in range(grad.ndim) if dim != 1])

    return Later(compute)


@rule(Embedding.name, 0)
def _embedding(node: Any) -> Later:
    rows, padding, by_frequency, sparse = Embedding.settings(node)
    padding = signed(padding)

    def compute(grad: Tensor, indices: Tensor) -> Tensor:
        return aten.embedding_backward(grad, indices, rows, padding, by_frequency, sparse)  # type: ignore[no-any-return]

    return Later(compute, Embedding.indices(node))


@rule(EmbeddingBag.name, 0)
def _embedding_bag(node: Any) -> Later:
    settings, padding = EmbeddingBag.settings(node), EmbeddingBag.padding(node)
    weights = EmbeddingBag.weights(node)

    def compute(grad: Tensor, indices: Tensor, *kept: Tensor) -> Tensor:
        return embedding_bag_backward(grad, indices, kept[:4], settings, kept[4] if weighted else None, padding)

    weighted = weights is not None
    more = (weights,) if weighted else ()
    return Later(compute, EmbeddingBag.indices(node), *EmbeddingBag.bags(node), *more)


# One product for each group: the experts of a mixture. Its sides are as mm's, and so are their gradients.


@rule(GroupedMm.name, 1)
def _grouped_right(node: Any) -> Later:
    rows_first = _is_by_rows(GroupedMm.right_strides(node))

    def compute(grad: Tensor, left: Tensor, *ends: Tensor) -> Tensor:
        if rows_first:
            return grouped_mm(left.mT, grad, *(ends or (None,)))
        return grouped_mm(grad.mT, left, *(ends or (None,))).mT  # laid out as the operand is

    return Later(compute, GroupedMm.left(node), *_ends(node))


@rule(GroupedMm.name, 0, role="left")
def _grouped_left(node: Any) -> Later:
    rows_first = _is_by_rows(GroupedMm.left_strides(node))

    def compute(grad: Tensor, right: Tensor, *ends: Tensor) -> Tensor:
        if rows_first:
            return grouped_mm(grad, right.mT, *(ends or (None,)))
        return grouped_mm(right, grad.mT, *(ends or (None,))).mT

    return Later(compute, GroupedMm.right(node), *_ends(node))


def _ends(node: Any) -> tuple[Tensor, ...]:
    ends = GroupedMm.ends(node)
    return () if ends is None else (ends,)


def _is_by_rows(strides: Sequence[int]) -> bool:
    return strides[-1] == 1


@rule(Trilinear.name, 1)
def _trilinear_middle(node: Any) -> Later:
    settings = Trilinear.settings(node)

    def compute(grad: Tensor, first: Tensor, third: Tensor) -> Tensor:
        return trilinear(first, grad, third, *settings)

    return Later(compute, Trilinear.first(node), Trilinear.third(node))


OWN_RULES = dict(RULES)
"""The rules above; a user's may take the place of some."""
