"""DTensors between stages: each rank sends its own shard, and how it was sharded goes into the description.

The ranks of two stages are two meshes, which have the same names for their dimensions. A stage that receives a shard
finds its own mesh by them, among those of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sternway.errors import PipelineError

_FIX = (
    "send a local tensor, as parallel styles do with use_local_output=True; or redistribute it to Shard or Replicate, "
    "on a mesh with named dimensions that parameters of both stages are on"
)


def sharded_like(value: Any, like: Tensor) -> Any:
    """A whole tensor, sharded as another one is, if that is a DTensor. Every process must have it whole."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a DTensor is sharded.

    Attributes:
        dims: the names of its mesh's dimensions.
        placements: one for each of them.
        shape: of the whole tensor.
        stride: of the whole tensor.
    """

    dims: tuple[str, ...]
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Self:
        """The layout of a DTensor.

        Raises:
            PipelineError: if it cannot be sent: its mesh has no names, or what ranks hold are terms of a sum.
        """
        names = tensor.device_mesh.mesh_dim_names
        if names is None or not all(type(each) in (Shard, Replicate) for each in tensor.placements):
            raise PipelineError(
                "a stage cannot send this DTensor",
                got=f"{tensor.placements} on a mesh with {f'the dimensions {names}' if names else 'no names'}",
                fix=_FIX,
            )
        return cls(tuple(names), tuple(tensor.placements), tensor.shape, tensor.stride())

    def join(self, shard: Tensor, parameters: Iterable[Tensor]) -> DTensor:
        """The DTensor of this layout, on the mesh that one of these parameters is on; differentiable.

        Raises:
            PipelineError: if none of them is on such a mesh.
        """
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                names = mesh.mesh_dim_names or ()
                if set(self.dims) <= set(names):
                    own = mesh if names == self.dims else mesh[self.dims]
                    made: DTensor = DTensor.from_local(
                        shard, own, self.placements, run_check=False, shape=self.shape, stride=self.stride
                    )
                    return made
        raise PipelineError(
            "a stage that receives a DTensor must have parameters on a mesh of the same dimensions",
            got=f"a DTensor on {self.dims}, and no parameter on such a mesh",
            fix=_FIX,
        )
