"""Sets of graphs on a CPU: replaced by the calls that they stand for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sternway import split
from sternway._torch.captures import preparing
from sternway.split.captured._form import CallForm
from sternway.split.captured._grads import GradBuffers
from sternway.split.captured._graphs import Outputs
from sternway.split.captured._look import TensorAttributes, Uncapturable


class CalledSet:
    """Does what a set of graphs does, with a copy of the module that has the same memory and no hooks."""

    def __init__(self, module: nn.Module, tensors: list[Tensor], grads: GradBuffers) -> None:
        self._module = copy.deepcopy(module)
        self._places = []
        for mine, parameter in zip(self._module.parameters(), module.parameters(), strict=True):
            mine.data = parameter.data
            if parameter.requires_grad:
                self._places.append((mine, grads._places[id(parameter)].buffer))
        self.wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        with preparing():
            made = Outputs(self._module(*tensors))
        self.tree, self.needing = made.tree, made.needing
        for mine, buffer in zip(self._module.buffers(), module.buffers(), strict=True):
            mine.data = buffer.data
        self.lease: Any = None

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad():
            self._made = Outputs(self._module(*self._inputs))
        return [t.detach().clone() for t in self._made.tensors]

    def backward_input(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        roots = [self._made.tensors[index] for index in self.needing]
        arriving = [torch.zeros_like(r) if grad is None else grad for r, grad in zip(roots, grads, strict=True)]
        found, self._pending = split.backward_input(roots, arriving, [self._inputs[i] for i in self.wanted])
        return list(found)

    def backward_weight(self) -> None:
        for parameter, buffer in self._places:
            parameter.grad = buffer
        self._pending.run()


class CalledForm:
    def __init__(self, module: nn.Module, _: Any, form: CallForm, tensors: list[Tensor], grads: GradBuffers) -> None:
        if (kind := form.varying()) is not None:
            raise Uncapturable(f"an argument is a {kind}, which may change unnoticed")
        self.form, self.sets = form, []
        self.trained = [p for p in module.parameters() if p.requires_grad]
        grads.include(self.trained)
        self._make = lambda: CalledSet(module, tensors, grads)
        self.attributes = TensorAttributes(list(module.modules()))

    def capture(self, count: int) -> None:
        while len(self.sets) < count:
            self.sets.append(self._make())

    def free_set(self, count: int) -> CalledSet | None:
        self.capture(count)
        return next((each for each in self.sets if each.is_free), None)
