"""A small language model, and how its parts are put on the ranks of a tensor-parallel mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gloo import TORCH

VOCABULARY, LENGTH, DIM, HEAD = 16, 6, 8, 4


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives. (torch's CommDebugMode puts hooks on several tensors, which autograd.grad refuses.)"""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


class ShardedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, HEAD)).transpose(1, 2)  # as many as are here

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        found: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class ShardedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = ShardedAttention()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ShardedLanguageModel(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*(ShardedBlock() for _ in range(layers)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def language_model(layers: int = 2) -> ShardedLanguageModel:
    torch.manual_seed(0)
    return ShardedLanguageModel(layers)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def parallel_plan(model: nn.Module, sequence: bool, whole_logits: bool = True) -> dict[str, ParallelStyle]:
    """The plan for ``parallelize_module``, of the model's modules that are there.

    Args:
        model: a language model, or a part of one.
        sequence: whether activations between blocks are shards of the sequence; else each rank has them whole.
        whole_logits: else they are left as a DTensor, sharded over the vocabulary.
    """
    between = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "attention": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "out": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Replicate() if whole_logits else Shard(-1),
            use_local_output=whole_logits,
        ),
    }
    styles |= {name: ColwiseParallel() for name in ("query", "key", "value")}
    if sequence:
        styles |= {name: SequenceParallel() for name in ("before", "between", "norm")}
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in styles]
    return {name: styles[name.rpartition(".")[2]] for name in names}


def put_on(model: nn.Module, mesh: DeviceMesh, sequence: bool, whole_logits: bool = True) -> nn.Module:
    """The model after ``parallelize_module``."""
    return parallelize_module(model, mesh, parallel_plan(model, sequence, whole_logits))


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_layout(ours: Tensor, theirs: Tensor, name: str = "") -> None:
    """Raise unless two tensors are of one type and, if sharded, sharded alike."""
    assert type(ours) is type(theirs), name
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor):
        added_up = TORCH < (2, 12) and theirs.placements == (Partial(),) and ours.placements == (Replicate(),)
        assert added_up or ours.placements == theirs.placements, f"{name}: {ours.placements}, not {theirs.placements}"
        assert ours.to_local().shape == theirs.to_local().shape, name
