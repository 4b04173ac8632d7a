"""A DeviceMesh as a pipeline sees it: one dimension of pipeline ranks, some along which data differ, and others.

Which gradients are averaged by whom? Along a dimension of different data,

    a parameter of FSDP whose mesh has the dimension   is averaged by FSDP
    any other that is sharded along it (experts)       has a sum over the data of all, which the pipeline divides
    any other, plain or a DTensor that is whole there  is averaged by the pipeline

Along a dimension of the same data (tensor parallelism) nothing is averaged. Slices of sequences (context parallelism)
are different data, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError

DATA_DIMS = ("dp", "dp_replicate", "dp_shard")
"""The names of dimensions along which processes get different rows, unless others are named."""
CP_DIM = "cp"
"""The name of the dimension along which they get different slices of the same sequences, unless another is named."""


class PipelineMesh:
    """The dimensions of a mesh, and which processes differ from this one along some of them.

    Args:
        mesh: a DeviceMesh with named dimensions.
        pp_dim: the name of the one along which the pipeline's ranks are.
        data_dims: the names of those along which rows differ; ``DATA_DIMS``, as far as the mesh has them, by default.
        cp_dim: the name of the one along which slices of sequences differ; ``CP_DIM``, if the mesh has it, by default.

    Attributes:
        names: of all dimensions.
        data: those along which data differ.
        names_data: whether the user named these.
        slices: the global ranks of the processes with the other slices of this one's sequences, and its own.
        device_type: where its processes compute.
        pipeline: the global ranks of this process's pipeline.
        peers: those of the processes that have the same stages as this one, or shards of them.
        everyone: those of all processes of the mesh.
    """

    def __init__(
        self, mesh: Any, pp_dim: str = "pp", data_dims: Sequence[str] | None = None, cp_dim: str | None = None
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError("a mesh needs torch.distributed", got="no process group", fix="start with torchrun")
        self.names: tuple[str, ...] = tuple(getattr(mesh, "mesh_dim_names", None) or ())
        if pp_dim not in self.names:
            raise PipelineError(
                f'mesh must have a dimension "{pp_dim}", of the pipeline\'s ranks',
                got=str(self.names),
                fix="pass mesh_dim_names to init_device_mesh, or pp_dim= to Pipeline",
            )
        wanted = [name for name in DATA_DIMS if name in self.names] if data_dims is None else list(data_dims)
        wrong = [name for name in wanted if name not in self.names or name == pp_dim]
        if isinstance(data_dims, str) or wrong:
            raise PipelineError(
                "data_dims must be names of dimensions of the mesh, other than the pipeline's",
                got=repr(data_dims),
                fix=f"pass some of {[name for name in self.names if name != pp_dim]}",
            )
        if cp_dim is not None and (cp_dim not in self.names or cp_dim == pp_dim):
            raise PipelineError(
                "cp_dim must be the name of a dimension of the mesh, other than the pipeline's",
                got=f"{cp_dim!r}, where the mesh has {self.names}",
                fix=f"pass one of {[name for name in self.names if name != pp_dim]}, or leave it out",
            )
        sliced = cp_dim or (CP_DIM if CP_DIM in self.names and pp_dim != CP_DIM else None)
        if sliced is not None and sliced not in wanted:
            wanted.append(sliced)
        self.data, self.names_data, self._mesh = tuple(wanted), data_dims is not None, mesh
        self._others = tuple(name for name in self.names if name != pp_dim)
        self._spanned: dict[Any, set[str]] = {}  # by the mesh of a DTensor
        self.device_type: str = mesh.device_type
        self.pipeline, self.peers, self.everyone = (self.along(dims) for dims in ([pp_dim], self._others, self.names))
        self.slices = self.along([] if sliced is None else [sliced])

    def along(self, dims: Collection[str]) -> list[int]:
        """The global ranks of the processes that differ from this one along these dimensions alone, and its own."""
        place = self._mesh.get_coordinate()
        index = tuple(slice(None) if name in dims else at for name, at in zip(self.names, place, strict=True))
        return [int(rank) for rank in self._mesh.mesh[index].flatten().tolist()]

    def group(self, dim: str) -> Any:
        """The process group of the processes that differ from this one along a dimension, and its own."""
        return self._mesh.get_group(dim)

    @property
    def is_first(self) -> bool:
        """Whether this process comes first among its peers."""
        return self.peers[0] == dist.get_rank()

    def spanned(self, tensor: Tensor) -> set[str]:
        """The dimensions that the mesh of a DTensor goes along; also if it has names of its own."""
        if not isinstance(tensor, DTensor):
            return set()
        mesh = tensor.device_mesh
        if mesh not in self._spanned:
            ranks = set(mesh.mesh.flatten().tolist())
            self._spanned[mesh] = {name for name in self._others if ranks >= set(self.along([name]))}
        return self._spanned[mesh]

    def sharded(self, tensor: Tensor) -> set[str]:
        """The dimensions along which processes have different shards of a tensor."""
        if not isinstance(tensor, DTensor):
            return set()
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
        found: set[str] = set()
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                index = tuple(slice(None) if each == dim else at for each, at in enumerate(place))
                ranks = set(mesh.mesh[index].flatten().tolist())
                found |= {name for name in self._others if ranks >= set(self.along([name]))}
        return found

    def averaged(self, parameter: Tensor, by_fsdp: bool) -> tuple[str, ...]:
        """The dimensions along which the pipeline averages a parameter's gradient."""
        others = self.spanned(parameter) if by_fsdp else self.sharded(parameter)
        return tuple(name for name in self.data if name not in others)

    def summed(self, parameter: Tensor, by_fsdp: bool) -> int:
        """Over how many processes' data a parameter's gradient is a sum, because it is sharded over them."""
        dims = set() if by_fsdp else self.sharded(parameter).intersection(self.data)
        return math.prod(len(self.along([name])) for name in dims)

    def share(self, tensor: Tensor) -> float:
        """What part of a sum over peers each of them counts, so that every number counts once."""
        pieces = 1
        if isinstance(tensor, DTensor):
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            pieces = math.prod(size for placement, size in sizes if not placement.is_replicate())
        return pieces / len(self.peers)

    def check_used(self, used: Iterable[str]) -> None:
        """Raise if there is a dimension of which nothing is known: neither data differ along it, nor parameters."""
        unknown = [name for name in self._others if name not in {*self.data, *used}]
        if unknown:
            raise PipelineError(
                "along each dimension of the mesh, data or parameters must differ",
                got=f'"{unknown[0]}", along which no parameter is a DTensor, and data_dims={self.data}',
                fix=f"pass data_dims={(*self.data, unknown[0])} if its processes get different rows, "
                f'cp_dim="{unknown[0]}" if slices of the same sequences, or shard parameters along it',
            )
