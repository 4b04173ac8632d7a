"""Tensors by name, written and read with the planners and storage of torch.distributed.checkpoint.

torch's reader unpickles ``.metadata``, and any entry that is not a tensor, without restrictions: whoever can write the
file can run code. Here ``.metadata`` may name only what describes tensors and bytes, only tensors are read, and every
one must be in a file of the manifest. Bytes are written for other programs: the options of optimizers.

Of a DTensor each process writes its own shard, and reads what overlaps with it, however it was sharded when it was
saved.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from sternway._torch.distributed import description_globals
from sternway.errors import CheckpointError
from sternway.pipeline.transport._crew import Crew, Outcome

METADATA = ".metadata"


class Writing:
    """Writes a tree of tensors into an empty folder; each process writes its own.

    A tensor that several processes have under one name is written once.

    Args:
        make: returns the tree of this process. If it raises on one process, all raise.
        folder: the empty folder.
        crew: the processes that write.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], folder: Path, crew: Crew) -> None:
        self._folder, self._crew = folder, crew
        self._writer, self._planner = FileSystemWriter(folder, overwrite=False), DefaultSavePlanner()
        self._description: Metadata | None = None

        def local() -> SavePlan:
            self._planner.set_up_planner(make(), self._writer.storage_meta(), crew.leads)
            self._writer.set_up_storage_writer(crew.leads)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        plans = crew.gather(crew.attempt(local))
        self._plan = crew.scatter(self._decide(plans)).result()

    def _decide(self, local: list[Outcome[SavePlan]]) -> list[Outcome[SavePlan]]:
        """Decide which process writes what: on the first process, for all."""
        if not self._crew.leads:
            return []

        def decide() -> list[SavePlan]:
            plans, self._description = self._planner.create_global_plan(self._crew.results(local))
            return self._writer.prepare_global_plan(plans)

        decided = self._crew.attempt(decide)
        if decided.error:
            return [decided] * self._crew.size  # type: ignore[list-item]  # an error fits everywhere
        return [Outcome.of(plan) for plan in decided.result()]

    def write(self) -> Any:
        """Write this process's part; returns what ``finish`` needs of it."""
        return self._writer.write_data(self._planner.finish_plan(self._plan), self._planner).wait()

    def written(self) -> list[Path]:
        """The files that this process wrote."""
        return list(self._folder.glob(f"__{self._crew.rank}_*"))

    def finish(self, parts: list[Any]) -> Path:
        """On the first process: describe what all wrote; returns the file with the description."""
        assert self._description is not None
        self._writer.finish(self._description, parts)
        return self._folder / METADATA


@final
class CheckpointReader(FileSystemReader):
    """torch's reader, except that the description is read by our own unpickler."""

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, files

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        return read_description(self._folder / METADATA, self._files)


def read_description(path: Path, files: Mapping[str, Any]) -> Metadata:
    """Read ``.metadata``, which says what tensors a checkpoint has, and where.

    Raises:
        CheckpointError: if it says anything else.
    """
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        problem = _problem(found, files)
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler may raise anything on bytes that are no pickle
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise CheckpointError(
            "a checkpoint's .metadata must describe tensors and nothing else",
            got=problem,
            fix="remove that checkpoint",
        )
    return found  # type: ignore[no-any-return]  # a Metadata: just looked


def _problem(found: Any, files: Mapping[str, Any]) -> str:
    if not isinstance(found, Metadata):
        return f"a {type(found).__name__}"
    for name, entry in found.state_dict_metadata.items():
        of_other_programs = isinstance(entry, BytesStorageMetadata) and name.startswith("optimizer.")
        if not isinstance(entry, TensorStorageMetadata) and not of_other_programs:
            return f"a {type(entry).__name__} for {name}"
    for index, place in found.storage_data.items():
        if place.relative_path not in files or place.transform_descriptors:
            return f"{index.fqn} in {place.relative_path!r}"
    return ""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in description_globals() or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise CheckpointError(
            "a checkpoint's .metadata must describe tensors and nothing else",
            got=f"{module}.{name}",
            fix="remove that checkpoint, and find out who wrote it",
        )


def host_buffer(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory on the CPU for a tensor of this shape; for a DTensor, a DTensor of the same shards."""
    if isinstance(like, DTensor):
        return like.detach().to("cpu", dtype, copy=True)  # keeps its mesh, whatever the device of that is
    return torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def read(reader: CheckpointReader, description: Metadata, wanted: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Read tensors to the CPU.

    Args:
        reader: of the checkpoint.
        description: of the checkpoint.
        wanted: for each name the tensor that it is for. Of a DTensor, only its shard is read.

    Raises:
        CheckpointError: if a name is missing.
    """
    into: dict[str, Any] = {}
    for name, like in wanted.items():
        entry = description.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                "the checkpoint does not have every tensor of the model",
                got=f"none for {name}",
                fix="resume the same model",
            )
        if isinstance(like, DTensor) and like.shape == entry.size:
            into[name] = host_buffer(like, entry.properties.dtype)
        else:
            into[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(into, description, is_coordinator=True)
    reader.set_up_storage_reader(description, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return into
