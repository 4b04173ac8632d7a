"""Do all processes begin with the same weights?

Each keeps its part of the model that it was given. With another seed on each, the parts would be of different models,
and copies of a stage would stay different: nothing would fail, and no process would ever have had this model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._facts import sample_checksum


def check_same_weights(stages: Mapping[int, nn.Module] | nn.Module, share: Callable[[Any], list[Any]]) -> None:
    """Raise unless a whole model has the same weights on all processes, of which a few entries each are compared.

    Args:
        stages: the argument of ``Pipeline``. Stages that are passed one by one are not compared, nor are shards or what
            is on the meta device.
        share: returns every process's value.

    Raises:
        PipelineError: on every process.
    """
    named = stages.named_parameters() if isinstance(stages, nn.Module) else ()
    mine = {name: sample_checksum(p) for name, p in named if not (p.is_meta or isinstance(p, DTensor))}
    everyone = share(mine)
    for rank, theirs in enumerate(everyone):
        for name, number in everyone[0].items():
            if theirs.get(name, number) != number:
                raise PipelineError(
                    "the model must have the same weights on every rank, of which each keeps its part",
                    got=f"other values of {name} on rank {rank} than on rank 0",
                    fix="call torch.manual_seed with one number on all ranks before the model is made, or load the "
                    "same weights on all of them",
                )
