"""Save a pipeline and resume it, with any number of ranks and any schedule.

Tensors are saved under their names in the whole model, so nothing depends on how it was cut. A save has two parts: a
copy of everything to the CPU, for which training waits, and the writing, which a thread does while training continues.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway import __version__
from sternway._torch.dtensors import local_part
from sternway.errors import CheckpointError
from sternway.pipeline.checkpoint import _files as files
from sternway.pipeline.checkpoint import _optimizer_state, _rng
from sternway.pipeline.checkpoint._files import File, Manifest
from sternway.pipeline.checkpoint._optimizer_state import STATE, OptimizerState
from sternway.pipeline.checkpoint._run_file import freeze, read_run, write_run
from sternway.pipeline.checkpoint._saving import CheckpointWarning, Resumed, Saving
from sternway.pipeline.checkpoint._tensors import (
    METADATA,
    CheckpointReader,
    Writing,
    host_buffer,
    read,
    read_description,
)
from sternway.pipeline.transport._crew import Crew, Outcome


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of ``Pipeline.save``."""

    directory: str | Path
    optimizer: torch.optim.Optimizer | None
    step: int
    scheduler: Any
    data: Any
    keep: int | None
    passes: int  # calls of ``Pipeline.step``: several may make one step, if gradients are accumulated


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process wrote of a checkpoint, for the first process."""

    written: Any
    files: dict[str, File]
    run: dict[str, Any]


class Checkpoints:
    """Saves and resumes one pipeline.

    Args:
        crew: the processes that save and resume together.
        stages: this process's, each with what comes before its names.
        ties: all names of each parameter that has several, by each of them.
        schedule: its name, for the manifest.
    """

    def __init__(
        self, crew: Crew, stages: Sequence[tuple[str, nn.Module]], ties: dict[str, tuple[str, ...]], schedule: str
    ) -> None:
        self._crew, self._ties, self._stages = crew.wrapping(CheckpointError), ties, stages
        self._made_with = {"sternway": __version__, "torch": torch.__version__, "schedule": schedule}
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._running: Saving | None = None
        self.passes: int | None = None  # of the checkpoint that was loaded, if it says so

    # Saving

    def save(self, request: SaveRequest, wait: bool) -> Saving:
        """Copy everything, and write it in a thread."""
        start = time.perf_counter()
        self.finish()  # one at a time: they share the buffers
        prepared = self._crew.attempt(lambda: self._copy(request))
        saving = self._running = Saving(lambda: self._write(request, prepared))
        if wait or prepared.error:
            self.finish()
        saving.stall_seconds = time.perf_counter() - start
        return saving

    def finish(self) -> None:
        """Wait for a save that is in progress."""
        if self._running is not None:
            saving, self._running = self._running, None
            saving.wait()

    def _copy(self, request: SaveRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copy everything: tensors, and the rest."""
        optimizer, scheduler = request.optimizer, request.scheduler
        _check(request.directory, optimizer, request.step, scheduler, request.keep)
        state = _optimizer_state.take(optimizer, self._names()) if optimizer is not None else OptimizerState()
        run = {
            "step": request.step,
            "passes": request.passes,
            "data": request.data,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "generators": _rng.take(),
            "fields": {name: list(fields) for name, fields in state.tensors.items()},
            "values": state.values,
            "options": state.options,
        }
        copies = {
            name: {key: self._copied((name, key), tensor) for key, tensor in fields.items()}
            for name, fields in state.tensors.items()
        }
        tensors = {
            "model": {name: self._copied(("model", name), tensor) for name, tensor in self._model().items()},
            "optimizer": _optimizer_state.as_torch_names(copies, state),
        }
        if _rng.uses_cuda():
            torch.cuda.synchronize()
        return tensors, freeze(run)

    def _copied(self, key: tuple[str, ...], tensor: Tensor) -> Tensor:
        """A copy on the CPU, in a buffer that the next save uses again."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            self._buffers[key] = buffer = host_buffer(tensor, tensor.dtype)
        local_part(buffer).copy_(local_part(tensor.detach()), non_blocking=True)
        return buffer

    def _write(self, request: SaveRequest, prepared: Outcome[Any]) -> Path:
        crew = self._crew

        def begin() -> Path:
            prepared.result()  # raises before a folder is made, if the arguments are wrong
            return files.begin(Path(request.directory), request.step)

        folder = crew.from_first(begin)
        writing = Writing(lambda: prepared.result()[0], folder, crew)

        def write() -> _Part:
            written = writing.write()
            return _Part(written, {path.name: files.digest(path) for path in writing.written()}, prepared.result()[1])

        parts = crew.gather(crew.attempt(write))
        return crew.from_first(lambda: self._commit(folder, writing, crew.results(parts), request))

    def _commit(self, folder: Path, writing: Writing, parts: list[_Part], request: SaveRequest) -> Path:
        """On the first process: make a checkpoint of what all wrote."""
        description = writing.finish([part.written for part in parts])
        write_run(folder / files.RUN, [part.run for part in parts])
        found = {name: digest for part in parts for name, digest in part.files.items()}
        for path in (description, folder / files.RUN):
            found[path.name] = files.digest(path)
        made_with = self._made_with | {"processes": str(len(parts))}
        return files.commit(folder, Manifest(request.step, found, made_with), request.keep)

    # Resuming

    def resume(
        self, directory: str | Path, optimizer: torch.optim.Optimizer | None, scheduler: Any, step: int | None
    ) -> Resumed | None:
        """Load the newest intact checkpoint, or that of ``step``."""
        self.finish()
        _check(directory, optimizer, step if step is not None else 0, scheduler, None)
        crew = self._crew
        found = crew.from_first(lambda: files.candidates(Path(directory)))
        if step is not None:
            found = [path for path in found if files.step_of(path) == step]
            if not found:
                raise CheckpointError(f"no checkpoint of step {step} in {directory}", fix="choose another step")
        problems = []
        for path in found:
            try:
                return self._load(path, optimizer, scheduler)
            except CheckpointError as error:
                if len(found) == 1:
                    raise
                problems.append(f"{path.name}: {error.rule} ({error.got})")
                if len(problems) < len(found) and crew.leads:
                    warnings.warn(f"{path} is skipped: {error}", CheckpointWarning, stacklevel=3)
        if problems:
            raise CheckpointError(
                f"no intact checkpoint in {directory}",
                got="; ".join(problems),
                fix="resume from another folder, or start again",
            )
        return None

    def _load(self, path: Path, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Resumed:
        """Load one checkpoint: on all processes, or, if one of them cannot, on none."""
        crew = self._crew

        def prepare() -> tuple[dict[str, Any], dict[str, Tensor], OptimizerState]:
            manifest = files.read_manifest(path)
            files.verify(path, manifest, crew.rank, crew.size)
            run = read_run(path, manifest)
            description = read_description(path / METADATA, manifest.files)
            state = OptimizerState(values=run["values"], options=run["options"])
            wanted: dict[str, Tensor | None] = {f"model.{name}": value for name, value in self._model().items()}
            fields: dict[str, list[str]] = {}
            if optimizer is not None:
                _optimizer_state.take(optimizer, self._names())  # raises if a parameter is unknown
                for name in self._names().values():
                    saved = _optimizer_state.known_name(name, state, self._ties)
                    fields[saved] = run["fields"][saved]
                    like = wanted.get(f"model.{name}")
                    wanted |= {f"{STATE}.{saved}.{key}": None if key == "step" else like for key in fields[saved]}
            loaded = read(CheckpointReader(path, manifest.files), description, wanted)
            _check_shapes(self._model(), loaded)
            state.tensors = {
                name: {key: loaded[f"{STATE}.{name}.{key}"] for key in keys} for name, keys in fields.items()
            }
            return run, loaded, state

        outcome = crew.attempt(prepare)
        crew.agree(lambda: outcome.result() and None)
        run, loaded, state = outcome.result()
        with torch.no_grad():
            for name, tensor in self._model().items():
                local_part(tensor).copy_(local_part(loaded[f"model.{name}"]))
        if optimizer is not None:
            _optimizer_state.give(optimizer, self._names(), state, self._ties)
        if scheduler is not None and run["scheduler"] is not None:
            scheduler.load_state_dict(run["scheduler"])
        _rng.give_one_of(run["generators"], crew.rank, crew.size)
        self.passes = run.get("passes")
        return Resumed(run["step"], run["data"], path)

    # Names

    def _model(self) -> dict[str, Tensor]:
        """This process's parameters and buffers, by their names in the whole model."""
        return {
            prefix + name: tensor for prefix, module in self._stages for name, tensor in module.state_dict().items()
        }

    def _names(self) -> dict[int, str]:
        """The name of each parameter of this process, by its id; the first, if it has several."""
        names: dict[int, str] = {}
        for prefix, module in self._stages:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names


def with_prefixes(stages: Mapping[int, nn.Module], whole: bool, crew: Crew) -> list[tuple[str, nn.Module]]:
    """Each stage with what comes before its names: nothing, unless stages have names in common.

    Then it is the stage's index, as if the stages were one ``nn.Sequential``. All processes call it together.

    Args:
        stages: this process's.
        whole: whether they are parts of a whole model, and so have its names.
        crew: the processes of the pipeline.
    """
    held = crew.share({index: list(stage.state_dict()) for index, stage in stages.items()})
    by_stage = {index: names for part in held for index, names in part.items()}
    names = [name for part in by_stage.values() for name in part]
    plain = whole or len(names) == len(set(names))
    return [("" if plain else f"{index}.", stages[index]) for index in sorted(stages)]


def _check(directory: Any, optimizer: Any, step: Any, scheduler: Any, keep: Any) -> None:
    """Raise unless the arguments of ``save`` or ``resume`` have the right types."""
    problem = ""
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        problem = f"the folder {directory!r}"
    elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"the optimizer {optimizer!r}"
    elif type(step) is not int or step < 0:
        problem = f"the step {step!r}"
    elif scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        problem = f"the scheduler {scheduler!r}"
    elif keep is not None and (type(keep) is not int or keep < 1):
        problem = f"keep={keep!r}"
    if problem:
        raise CheckpointError(
            "a checkpoint needs a folder, an optimizer or None, a step from 0 on, a scheduler or None, keep from 1 on",
            got=problem,
            fix='call pipe.save("checkpoints", optimizer, step, keep=3)',
        )


def _check_shapes(model: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    for name, tensor in model.items():
        saved = loaded[f"model.{name}"]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"{name} must have the shape that it was saved with, {tuple(saved.shape)}",
                got=str(tuple(tensor.shape)),
                fix="resume the same model",
            )
