"""The rules for torch's own nodes. ``node._saved_x`` is the operand ``x`` as the forward saw it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway.split._later import Later, Product
from sternway.split._rules import rule
from sternway.split._target import signed

aten = torch.ops.aten

# y = a @ b, for matrices (mm) and stacks of them (bmm).


@rule("MmBackward0", 1)
@rule("BmmBackward0", 1)
def _product_right(node: Any) -> Product:
    return Product(left=node._saved_self)


@rule("MmBackward0", 0, role="left")
@rule("BmmBackward0", 0, role="left")
def _product_left(node: Any) -> Product:
    return Product(right=node._saved_mat2)


# y = beta * bias + alpha * a @ b: Linear with a bias, and its stacked form.


@rule("AddmmBackward0", 2)
def _addmm_right(node: Any) -> Product:
    return Product(left=node._saved_mat1, scale=node._saved_alpha.conjugate())


@rule("AddmmBackward0", 1, role="left")
def _addmm_left(node: Any) -> Product:
    return Product(right=node._saved_mat2, scale=node._saved_alpha.conjugate())


@rule("BaddbmmBackward0", 2)
def _baddbmm_right(node: Any) -> Product:
    return Product(left=node._saved_batch1, scale=node._saved_alpha.conjugate())


@rule("BaddbmmBackward0", 1, role="left")
def _baddbmm_left(node: Any) -> Product:
    return Product(right=node._saved_batch2, scale=node._saved_alpha.conjugate())


@rule("AddmmBackward0", 0, role="bias")
@rule("BaddbmmBackward0", 0, role="bias")
def _added(node: Any) -> Later | None:
    beta = node._saved_beta.conjugate()
    return None if beta == 1 else Later(lambda grad: grad * beta)


# Convolutions, plain and transposed, in any number of dimensions. Only the weight's shape matters to its gradient.


@rule("ConvolutionBackward0", 1)
def _convolution_weight(node: Any) -> Later:
    settings = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def compute(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        _, value, _ = aten.convolution_backward(grad, x, weight, None, *settings, (False, True, False))
        return value  # type: ignore[no-any-return]  # torch.ops is untyped

    return Later(compute, node._saved_input, node._saved_weight)


@rule("ConvolutionBackward0", 2, role="bias")
def _convolution_bias(node: Any) -> Later:
    return Later(lambda grad: grad.sum([dim for dim in range(grad.ndim) if dim != 1]))


@rule("EmbeddingBackward0", 0)
def _embedding(node: Any) -> Later:
    rows, padding = node._saved_weight_sym_argsize_0, signed(node._saved_padding_idx)
    by_frequency, sparse = node._saved_scale_grad_by_freq, node._saved_sparse

    def compute(grad: Tensor, indices: Tensor) -> Tensor:
        return aten.embedding_backward(grad, indices, rows, padding, by_frequency, sparse)  # type: ignore[no-any-return]

    return Later(compute, node._saved_indices)
