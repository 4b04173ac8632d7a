"""What a captured graph is made of: plain frozen records, with no reference to a tensor or a node of torch's.

Of nodes and saved tensors a graph may have hundreds of thousands, so these two are named tuples: they take a fifth of
the time that a frozen dataclass takes to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Role = Literal["activation", "parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's shape, dtype and device. A shape of None: not known (a nested or a packed tensor)."""

    shape: tuple[int, ...] | None
    dtype: str
    device: str

    def __str__(self) -> str:
        shape = "?" if self.shape is None else "×".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}" + ("" if self.device == "cpu" else f" on {self.device}")


class Saved(NamedTuple):
    """One tensor that a node keeps for its backward.

    ``nbytes`` is the tensor's own size, ``storage_nbytes`` that of the storage behind it, which is what stays
    allocated: a slice of a large tensor keeps all of it. Storages are numbered; one number is one piece of memory.
    """

    name: str  # the slot: "self", "mat2", "result"
    tensor: TensorInfo
    nbytes: int
    storage: int | None  # None: nothing is kept here (a checkpoint will recompute it)
    storage_nbytes: int
    role: Role = "activation"
    of: str | None = None  # the parameter or buffer, by name where that is known
    view: bool = False  # it is a view of that parameter or buffer, not the thing itself
    hook: str | None = None  # what stands in for it: "checkpoint", "save_on_cpu", or the unpack hook's name


class Node(NamedTuple):
    """One operation's backward.

    ``inputs`` and ``next`` go together, one for each input of the forward operation: what it was, and which output of
    which node made it. Both are None where that input needs no gradient.
    """

    id: int  # its place in ``Graph.nodes``; whatever made a node's inputs has a smaller one
    kind: str  # "AddmmBackward0"
    sequence: int | None  # the order of creation; None for a leaf
    outputs: tuple[TensorInfo, ...]
    inputs: tuple[TensorInfo | None, ...]
    next: tuple[tuple[int, int] | None, ...]
    module: str = ""  # the owner: "layers.3.mlp.up"; "" outside every module
    parameter: str | None = None  # at a leaf that is a parameter: its name, "" if no model was given to name it
    saved: tuple[Saved, ...] = ()
    hooks: tuple[str, ...] = ()
    source: str | None = None  # "model.py:31 in forward", in a recorded graph
    op: str | None = None  # the function that was called there
    freed: bool = False  # a backward has run here, and let go of what was saved

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
    """``source`` sends the gradient of its input number ``input`` to ``target``, which made it as output ``output``."""

    source: int
    input: int
    target: int
    output: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model that was given to ``capture``, used in the graph or not."""

    name: str
    tensor: TensorInfo
    nbytes: int
    requires_grad: bool
    node: int | None  # its leaf, if gradient reaches it


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node whose weight gradients would wait for W, and those parameters (by name, or "leaf 12" without one)."""

    node: int
    kind: str  # the rule is by kind
    module: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitPreview:
    """What ``split.backward_input`` would leave to W, and what it would compute in I."""

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
