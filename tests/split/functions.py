"""Custom Functions as libraries write them, honest and not, and a model around any of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Recipe:
    """An object on ctx, as Transformer Engine has them."""

    dtype = torch.bfloat16


class QuantizedLinear(Function):
    """A linear layer that casts to few bits, with scales and options on ctx; its gradients only where needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, use_bias: bool) -> Tensor:
        x_scale, w_scale = x.abs().amax() / 4, weight.abs().amax() / 4
        low_x, low_w = (x / x_scale).to(recipe.dtype), (weight / w_scale).to(recipe.dtype)
        ctx.save_for_backward(low_x, low_w, weight)
        ctx.scales, ctx.recipe, ctx.use_bias, ctx.shape = (x_scale, w_scale), recipe, use_bias, x.shape
        y = low_x.float() @ low_w.float().t() * (x_scale * w_scale)
        return y + bias if use_bias and bias is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low_x, low_w, weight = ctx.saved_tensors
        x_scale, w_scale = ctx.scales
        g_scale = grad.abs().amax() / 4
        low_grad = (grad / g_scale).to(ctx.recipe.dtype).float()  # both parts need it
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (low_grad @ low_w.float() * (g_scale * w_scale)).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (low_grad.t() @ low_x.float() * (g_scale * x_scale)).to(weight.dtype)
        if ctx.use_bias and ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        return of_x, of_weight, of_bias, None, None


class Product(Function):
    """``x @ weight``, as simple as it can be; others here are made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = len(rest)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        of_x, of_weight = grad @ weight.t() if needs[0] else None, x.t() @ grad if needs[1] else None
        return of_x, of_weight, *[None] * ctx.rest


class FusedLoss(Function):
    """Linear layer and cross entropy in one, whose gradients are computed in the forward: as Liger has it."""

    in_place = False

    @classmethod
    def _fused(cls, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ weight.t()
        loss = torch.nn.functional.cross_entropy(logits, target)
        of_logits = (logits.softmax(1) - torch.nn.functional.one_hot(target, logits.shape[1])) / len(x)
        return loss, of_logits @ weight, of_logits.t() @ x

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, of_x, of_weight = FusedLoss._fused(x, weight, target)
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * grads[0], of_weight * grads[0], None


class FusedLossInPlace(FusedLoss):
    """The same, which scales what it saved in place, without autograd's notice."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.saved_tensors
        if grads[0] != 1:
            of_x.numpy()[...] *= grads[0].item()
            of_weight.numpy()[...] *= grads[0].item()
        return of_x if ctx.needs_input_grad[0] else None, of_weight if ctx.needs_input_grad[1] else None, None


class RecomputedLoss(FusedLoss):
    """The same loss, whose backward computes the logits again, and then what is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, target)
        return torch.nn.functional.cross_entropy(x @ weight.t(), target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, target = ctx.saved_tensors
        logits = x @ weight.t()
        of_logits = logits.softmax(1) - torch.nn.functional.one_hot(target, logits.shape[1])
        of_logits *= grads[0] / len(x)
        needs = ctx.needs_input_grad
        return of_logits @ weight if needs[0] else None, of_logits.t() @ x if needs[1] else None, None


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed, scaled = x * rstd, grads[0] * weight
        of_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        of_weight = (grads[0] * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


class Around(nn.Module):
    """A Function that takes ``(x, weight)``, between two layers."""

    def __init__(self, function: type[Function], size: int = 4) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(size, size))
        self.before, self.after = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "main_grad"):
            self.weight.main_grad = torch.zeros_like(self.weight)
        return self.after(self.function.apply(self.before(x), self.weight).tanh())
