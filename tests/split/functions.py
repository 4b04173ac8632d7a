"""Custom Functions as libraries write them, honest and not, and a model around any of them."""

from __future__ import annotations

import itertools
import random
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


# Backwards that must stay whole, each with the words that tell why.


class Ignores(Product):
    """Returns all gradients whatever is needed."""

    why = "does not do as needs_input_grad says"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0], *[None] * ctx.rest


class LiesAboutValues(Product):
    """Does as it is told, but computes another weight gradient when it is called for weights alone."""

    why = "computes other gradients for its weights alone"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, *rest = Product.backward(ctx, *grads)
        if of_x is None and of_weight is not None:
            of_weight = of_weight * 1.0001
        return of_x, of_weight, *rest


class Calls:
    count = 0


class CountsElsewhere(Product):
    why = "changes Calls"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Calls.count += 1
        return Product.backward(ctx, *grads)


class CountsOnItself(Product):
    why = r"changes CountsOnItself"
    calls: list[int] = []  # noqa: RUF012 - shared on purpose

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        CountsOnItself.calls.append(1)
        return Product.backward(ctx, *grads)


def _remember(seen: list[int]) -> None:
    seen.append(len(seen))


class CountsByAHelper(Product):
    why = r"changes .*_SEEN"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _remember(_SEEN)
        return Product.backward(ctx, *grads)


_SEEN: list[int] = []


class FusesAccumulation(Product):
    """Adds the weight's gradient to ``main_grad`` itself, by a kernel of its own, as Megatron does."""

    why = "changes tensors in place, by a kernel"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, *rest = Product.backward(ctx, *grads)
        if of_weight is not None:
            ctx.saved_tensors[1].main_grad.numpy()[...] += of_weight.numpy()
        return of_x, of_weight, *rest


class AddsToMainGrad(Product):
    why = "changes tensors in place"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, *rest = Product.backward(ctx, *grads)
        if of_weight is not None:
            ctx.saved_tensors[1].main_grad += of_weight
        return of_x, of_weight, *rest


HIDDEN = torch.zeros(())


class AddsToAHiddenTensor(Product):
    """Nothing that can be looked at leads to the tensor; the operation is stopped before it writes."""

    why = r"writes to a tensor that it has not made \(aten::add_"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor, total: Tensor = HIDDEN) -> tuple[Tensor | None, ...]:
        total += 1
        return Product.backward(ctx, *grads)


class ChangesItsGradient(Product):
    why = "changes tensors in place"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0].mul_(2))


class TakesFromCtx(Product):
    """Empties a list that the forward put on ctx."""

    why = "changes ctx.scales"

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.scales = [1, 1]
        return Product.forward(ctx, x, weight, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0] * ctx.scales.pop())


class Draws(Product):
    why = "draws random numbers"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0] * torch.rand(()))


class DrawsWithPython(Product):
    why = "draws random numbers"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0] * (1 + random.random()))


_NUMBERS = itertools.count(1)


class RunsABackward(Product):
    """Computes its forward again, and runs a backward of its own, which adds to ``.grad``."""

    why = "changes tensors in place"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            with torch.enable_grad():
                torch.autograd.backward((x.detach() @ weight) / 2, grads[0])
        return Product.backward(ctx, *grads)


class Differs(Product):
    """Gives something else each time, and nothing shows it but the numbers."""

    why = "is not deterministic"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor, numbers: Any = _NUMBERS) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0] * next(numbers))


_BUFFERS: dict[Any, Tensor] = {}


class ReturnsItsBuffer(Product):
    """Writes each weight gradient into the same memory, by a kernel of its own."""

    why = "returns memory that its next call writes to"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor, buffers: Any = _BUFFERS) -> tuple[Tensor | None, ...]:
        of_x, of_weight, *rest = Product.backward(ctx, *grads)
        if of_weight is not None:
            buffer = buffers.setdefault(of_weight.shape, torch.empty_like(of_weight))
            buffer.numpy()[...] = of_weight.numpy() + (of_x is None)
            of_weight = buffer
        return of_x, of_weight, *rest


class RaisesInParts(Product):
    why = "raises ZeroDivisionError in a trial"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        1 / all(ctx.needs_input_grad[:2])
        return Product.backward(ctx, *grads)


class TakesBoxes(Product):
    why = "takes what it needs out of ctx"
    clear_saved_tensors_on_access = True


WHOLE = [
    Ignores,
    LiesAboutValues,
    CountsElsewhere,
    CountsOnItself,
    CountsByAHelper,
    FusesAccumulation,
    AddsToMainGrad,
    AddsToAHiddenTensor,
    ChangesItsGradient,
    TakesFromCtx,
    Draws,
    DrawsWithPython,
    RunsABackward,
    ReturnsItsBuffer,
    RaisesInParts,
    TakesBoxes,
]


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
