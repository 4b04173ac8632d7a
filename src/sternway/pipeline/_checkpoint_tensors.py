"""Tensors by name, written and read with torch.distributed.checkpoint's planners and storage.

torch's reader unpickles a checkpoint's ``.metadata``, and any entry that says it is no tensor, as found: whoever
may write the file may run code. Here ``.metadata`` may name nothing but what describes tensors, every entry must be a
tensor, and every tensor must lie in a file of the manifest.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from sternway.errors import CheckpointError
from sternway.pipeline._crew import Crew, Outcome

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class Writing:
    """A tree of tensors on its way into an empty folder, each process writing its own.

    A tensor that several processes have under one name is written once.

    Args:
        make: gives the tree; where it raises, all processes raise.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], folder: Path, crew: Crew) -> None:
        self._folder, self._crew = folder, crew
        self._writer, self._planner = FileSystemWriter(folder, overwrite=False), DefaultSavePlanner()
        self._description: Metadata | None = None

        def local() -> SavePlan:
            self._planner.set_up_planner(make(), self._writer.storage_meta(), crew.leads)
            self._writer.set_up_storage_writer(crew.leads)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        plans = crew.gather(Outcome(local))
        self._plan = crew.scatter(self._decide(plans)).result()

    def _decide(self, local: list[Outcome[SavePlan]]) -> list[Outcome[SavePlan]]:
        """Who writes what: on the first process, for all."""
        if not self._crew.leads:
            return []

        def decide() -> list[SavePlan]:
            plans, self._description = self._planner.create_global_plan(self._crew.whole(local))
            return self._writer.prepare_global_plan(plans)

        decided = Outcome(decide)
        if decided.error:
            return [decided] * self._crew.size  # type: ignore[list-item]  # an error fits everywhere
        return [Outcome.of(plan) for plan in decided.result()]

    def write(self) -> Any:
        """Write this process's part; what ``finish`` needs of it."""
        return self._writer.write_data(self._planner.finish_plan(self._plan), self._planner).wait()

    def written(self) -> list[Path]:
        """The files that this process wrote."""
        return list(self._folder.glob(f"__{self._crew.rank}_*"))

    def finish(self, parts: list[Any]) -> Path:
        """Describe what all wrote, on the first process; the file with the description."""
        assert self._description is not None
        self._writer.finish(self._description, parts)
        return self._folder / METADATA


class Reader(FileSystemReader):
    """torch's reader, with a checkpoint's description read as data."""

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, files

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        return read_description(self._folder / METADATA, self._files)


def read_description(path: Path, files: Mapping[str, Any]) -> Metadata:
    """What tensors a checkpoint has and where, if that is all its ``.metadata`` says.

    Raises:
        CheckpointError: anything else.
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
            "a checkpoint's .metadata describes tensors, and nothing else", got=problem, fix="remove that checkpoint"
        )
    return found  # type: ignore[no-any-return]  # a Metadata: just looked


def _problem(found: Any, files: Mapping[str, Any]) -> str:
    if not isinstance(found, Metadata):
        return f"a {type(found).__name__}"
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"a {type(entry).__name__} for {name}"
    for index, place in found.storage_data.items():
        if place.relative_path not in files or place.transform_descriptors:
            return f"{index.fqn} in {place.relative_path!r}"
    return ""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(
            "a checkpoint's .metadata describes tensors, and nothing else",
            got=f"{module}.{name}",
            fix="remove that checkpoint, and find out who wrote it",
        )


def read(reader: Reader, description: Metadata, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of these names, on the CPU.

    Raises:
        CheckpointError: a name that is not there, or a file that does not hold what it should.
    """
    into: dict[str, Any] = {}
    for name in names:
        entry = description.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                "a checkpoint has every tensor that is asked for", got=f"none for {name}", fix="resume the same model"
            )
        into[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(into, description, is_coordinator=True)
    reader.set_up_storage_reader(description, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return into
