"""Do all processes begin with the same weights?

Each keeps its part of the model that it was given. With another seed on each, the parts would be of different models,
and copies of a stage would stay different: nothing would fail, and no process would ever have had this model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._facts import sample_checksum


def check_same_weights(
    stages: Mapping[int, nn.Module] | nn.Module, copies: Sequence[int], share: Callable[[Any], list[Any]]
) -> None:
    """Raise unless processes begin with the same weights, of which a few entries each are compared.

    Args:
        stages: the argument of ``Pipeline``. A whole model is compared over all processes; stages that are passed one
            by one over those that get other data. Shards are not compared, nor is what is on the meta device.
        copies: the global ranks of the processes that get other data and hold the same stages.
        share: returns every process's value.

    Raises:
        PipelineError: on every process.
    """
    whole = isinstance(stages, nn.Module)
    modules = {-1: stages} if isinstance(stages, nn.Module) else stages if len(copies) > 1 else {}
    place = () if whole else tuple(copies)
    mine = {
        (place, index, name): sample_checksum(p)
        for index, module in modules.items()
        for name, p in module.named_parameters()
        if not (p.is_meta or isinstance(p, DTensor))
    }
    first: dict[Any, tuple[int, int]] = {}  # by parameter, what the first process that has it has, and which that is
    for rank, theirs in enumerate(share(mine)):
        for key, number in theirs.items():
            known, other = first.setdefault(key, (number, rank))
            if known != number:
                raise PipelineError(
                    "the model must have the same weights on every rank, of which each keeps its part"
                    if whole
                    else f"stage {key[1]} must have the same weights on all processes that get other data for it",
                    got=f"other values of {key[2]} on rank {rank} than on rank {other}",
                    fix="call torch.manual_seed with one number on all ranks before the model is made, or load the "
                    "same weights on all of them",
                )
