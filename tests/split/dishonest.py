"""Custom Functions whose backward must stay whole, each with the words that tell why."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from functions import Product
from torch import Tensor


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
