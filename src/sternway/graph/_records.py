"""The records of a captured graph: frozen, without references to tensors or nodes of torch.

A graph may have hundreds of thousands of nodes and saved tensors, so these two are named tuples: they are made five
times faster than frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Role = Literal["activation", "parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's shape, dtype and device. The shape is None if it is not known (a nested or a packed tensor)."""

    shape: tuple[int, ...] | None
    dtype: str
    device: str

    def __str__(self) -> str:
        shape = "?" if self.shape is None else "×".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}" + ("" if self.device == "cpu" else f" on {self.device}")


class Saved(NamedTuple):
    """One tensor that a node saved for its backward.

    ``nbytes`` is the tensor's own size, ``storage_nbytes`` that of its storage, which is what stays allocated: a slice
    of a large tensor keeps all of it. Tensors with the same ``storage`` number share memory.
    """

    name: str  # the operand: "self", "mat2", "result"
    tensor: TensorInfo
    nbytes: int
    storage: int | None  # None: nothing is allocated (a checkpoint will recompute it)
    storage_nbytes: int
    role: Role = "activation"
    of: str | None = None  # the parameter's or buffer's name, if known
    view: bool = False  # a view of that parameter or buffer
    hook: str | None = None  # who packed it: "checkpoint", "save_on_cpu", or the unpack hook's name


class Node(NamedTuple):
    """One operation's backward.

    ``inputs`` and ``next`` have one entry for each input of the forward operation: what the input was, and which
    output of which node made it. Both are None where that input requires no gradient.
    """

    id: int  # its index in ``Graph.nodes``; the nodes that made its inputs have smaller ones
    kind: str  # "AddmmBackward0"
    sequence: int | None  # the order of creation; None for a leaf
    outputs: tuple[TensorInfo, ...]
    inputs: tuple[TensorInfo | None, ...]
    next: tuple[tuple[int, int] | None, ...]
    module: str = ""  # the owner: "layers.3.mlp.up"; "" outside every module
    parameter: str | None = None  # of a parameter's leaf: the name, "" if no model was passed
    saved: tuple[Saved, ...] = ()
    hooks: tuple[str, ...] = ()
    source: str | None = None  # "model.py:31 in forward", in a recorded graph
    op: str | None = None  # the function that was called there
    freed: bool = False  # a backward has run, and freed what was saved

    @property
    def is_leaf(self) -> bool:
        return self.kind == "AccumulateGrad"

    def __str__(self) -> str:
        what = f"{self.kind} [{self.id}]"
        if self.parameter:
            what += f" {self.parameter}"
        elif self.module:
            what += f" in {self.module}"
        return what + (f" at {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True)
class Edge:
    """``source`` passes the gradient of its input ``input`` to ``target``, whose output ``output`` that input was."""

    source: int
    input: int
    target: int
    output: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model that was passed to ``capture``, used in the graph or not."""

    name: str
    tensor: TensorInfo
    nbytes: int
    requires_grad: bool
    node: int | None  # its leaf, if it gets a gradient


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node whose weight gradients would be computed in W, and their parameters (by name, or as "leaf 12")."""

    node: int
    kind: str
    module: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitPreview:
    """Which weight gradients ``split.backward_input`` would leave to W, and which it would compute in I."""

    waits: tuple[Waiting, ...]
    ready: tuple[str, ...]
    refused: str | None = None  # the reason, if the split refuses this graph

    def __str__(self) -> str:
        if self.refused:
            return f"cannot be split: {self.refused}"
        lines = [f"{sum(len(wait.parameters) for wait in self.waits)} parameters wait for W:"]
        lines += [
            f"  {', '.join(wait.parameters)}  ({wait.kind} in {wait.module or 'no module'})" for wait in self.waits
        ]
        lines += [f"{len(self.ready)} are computed in I:", *(f"  {name}" for name in self.ready)]
        return "\n".join(lines)
