"""F, I and W of one microbatch: three graphs, and the memory that they work in.

    [1] copy the inputs in, replay F            what the backward needs stays in the set's own pool
    [2] copy the outputs' gradients in, replay I    frees some of that in the pool, and keeps what W needs
    [3] replay W                                adds to the gradient buffers

Where Python has a part in I or W (``state.on_grad``), that one is several graphs, with calls between them.

The three share a pool, because they are always replayed in the order in which they were captured. Two sets share
none: they are in flight at the same time. Outputs and input gradients are given out as copies, so that they live as
long as any other tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sternway._torch.captures import Places, capturing, own_workspaces
from sternway._torch.tensors import ORDINARY
from sternway._tree import TensorIndex, replace_leaves
from sternway.split._backward import backward_input
from sternway.split.captured._look import Uncapturable

Forward = Callable[[list[Tensor]], Any]
"""Calls the module with these tensors among its arguments."""


class Outputs:
    """What a forward returned: its tensors, each once, and the rest.

    Attributes:
        tree: with a ``TensorIndex`` for each tensor.
        tensors: the tensors.
        needing: the indices of those that a gradient comes back for.
    """

    def __init__(self, result: Any) -> None:
        indices: dict[int, int] = {}
        self.tensors: list[Tensor] = []

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in indices:
                indices[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            return TensorIndex(indices[id(leaf)])

        self.tree = replace_leaves(replace, result)
        self.needing = [index for index, tensor in enumerate(self.tensors) if tensor.requires_grad]

    def check(self, device: torch.device) -> None:
        """Raise ``Uncapturable`` unless all are ordinary tensors on the device."""
        for tensor in self.tensors:
            if type(tensor) not in ORDINARY or tensor.layout is not torch.strided or tensor.device != device:
                raise Uncapturable(f"it returns a {type(tensor).__name__} of {tensor.layout} on {tensor.device}")


class GraphSet:
    """The graphs of one microbatch.

    Args:
        forward: calls the module.
        inputs: the tensors that it is called with; later calls copy theirs into them.
        in_grad: a block in which W adds to the gradient buffers.
    """

    def __init__(self, forward: Forward, inputs: list[Tensor], in_grad: AbstractContextManager[None]) -> None:
        self._inputs = [tensor.detach() for tensor in inputs]
        self._device = inputs[0].device
        self.wanted = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
        self._places = Places()
        self._begun: list[Any] = []  # what the places have, from F to W
        self._stream = torch.cuda.current_stream(self._device)  # that was used last
        self.lease: weakref.ref[Any] | None = None  # of who uses the set
        pool = torch.cuda.graph_pool_handle()
        with own_workspaces():
            with capturing(pool, self._places) as self._f:
                made = Outputs(forward(inputs))
            roots = [made.tensors[index] for index in made.needing]
            self._arriving = [torch.zeros_like(root) for root in roots]
            wanted = [inputs[index] for index in self.wanted]
            with torch.autocast("cuda", enabled=False):
                with capturing(pool, self._places) as self._i:
                    found, pending = backward_input(roots, self._arriving, wanted, own_thread=True)
                with in_grad, capturing(pool, self._places) as self._w:
                    pending.compute(tell_nodes=False)
        self.tree, self.needing = made.tree, made.needing
        self._outputs = [tensor.detach() for tensor in made.tensors]
        self._found: list[Tensor | None] = list(found)

    @property
    def is_free(self) -> bool:
        """Whether no microbatch uses it: its W has run, or what it left was dropped."""
        return self.lease is None or self.lease() is None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """F: the outputs."""
        self._join_stream()
        for mine, tensor in zip(self._inputs, tensors, strict=True):
            mine.copy_(tensor)
        self._begun = self._places.begin()
        self._f.replay()
        return [output.clone() for output in self._outputs]

    def backward_input(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """I: the gradients of the inputs that need one. An output without a gradient counts as zero."""
        self._join_stream()
        for mine, grad in zip(self._arriving, grads, strict=True):
            mine.zero_() if grad is None else mine.copy_(grad)
        self._i.replay(self._begun)
        return [None if grad is None else grad.clone() for grad in self._found]

    def backward_weight(self) -> None:
        """W: adds to the gradient buffers."""
        self._join_stream()
        begun, self._begun = self._begun, []
        self._w.replay(begun)

    def _join_stream(self) -> None:
        """Begin after what the set did last, on whichever stream that was."""
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)
            self._stream = current
