"""Save a pipeline and go on from there: with as many ranks or others, by this schedule or another, or without us.

Tensors are kept under the whole model's names, so that no trace of the cut remains. A save has two parts: a copy of
everything to the CPU, for which the step waits, and the writing, which a thread does while training goes on.
"""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway import __version__
from sternway.errors import CheckpointError
from sternway.pipeline import _checkpoint_files as files
from sternway.pipeline import _optimizer_state, _rng
from sternway.pipeline._checkpoint_files import File, Manifest
from sternway.pipeline._checkpoint_tensors import METADATA, Reader, Writing, read, read_description
from sternway.pipeline._crew import Crew, Outcome
from sternway.pipeline._optimizer_state import OptimizerState
from sternway.pipeline._saving import CheckpointWarning, Resumed, Saving

_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class _Part:
    """One process's part of a checkpoint, as the first process hears of it."""

    written: Any
    files: dict[str, File]
    run: dict[str, Any]


class Checkpoints:
    """Saves and resumes one pipeline.

    Args:
        crew: the processes that do it together.
        stages: this process's.
        whole: whether the stages' parameters have the whole model's names.
        ties: for a parameter that has several names, the others.
        schedule: its name, for people to read in the manifest.
    """

    def __init__(
        self, crew: Crew, stages: Mapping[int, nn.Module], whole: bool, ties: dict[str, tuple[str, ...]], schedule: str
    ) -> None:
        self._crew, self._ties = crew, ties
        self._stages = _with_prefixes(stages, whole, crew)
        self._made_with = {"sternway": __version__, "torch": torch.__version__, "schedule": schedule}
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._running: Saving | None = None

    # Saving

    def save(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        scheduler: Any,
        data: Any,
        keep: int | None,
        wait: bool,
    ) -> Saving:
        start = time.perf_counter()
        self.finish()  # one at a time: they share the buffers
        prepared = Outcome(lambda: self._copy(directory, optimizer, step, scheduler, data, keep))
        saving = self._running = Saving(lambda: self._write(directory, step, prepared, keep))
        if wait or prepared.error:
            self.finish()
        saving.stall_seconds = time.perf_counter() - start
        return saving

    def finish(self) -> None:
        """Wait for a save that is under way."""
        if self._running is not None:
            saving, self._running = self._running, None
            saving.wait()

    def _copy(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        scheduler: Any,
        data: Any,
        keep: int | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Everything as it is now: tensors, and the rest."""
        _check(directory, optimizer, step, scheduler, keep)
        state = _optimizer_state.take(optimizer, self._names()) if optimizer is not None else OptimizerState()
        run = {
            "step": step,
            "data": data,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "generators": _rng.take(),
            "fields": {name: list(fields) for name, fields in state.tensors.items()},
            "values": state.values,
            "options": state.options,
        }
        tensors = {
            "model": {name: self._copied(("model", name), tensor) for name, tensor in self._model().items()},
            "optimizer": {
                name: {key: self._copied((name, key), tensor) for key, tensor in fields.items()}
                for name, fields in state.tensors.items()
                if fields
            },
        }
        if _rng.uses_cuda():
            torch.cuda.synchronize()
        return tensors, _frozen(run)

    def _copied(self, key: tuple[str, ...], tensor: Tensor) -> Tensor:
        """A copy on the CPU, in memory that the next save uses again."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _write(self, directory: str | Path, step: int, prepared: Outcome[Any], keep: int | None) -> Path:
        crew = self._crew

        def begin() -> Path:
            prepared.result()  # nothing is begun with what is no folder or no step
            return files.begin(Path(directory), step)

        folder = crew.from_first(begin)
        writing = Writing(lambda: prepared.result()[0], folder, crew)

        def write() -> _Part:
            written = writing.write()
            return _Part(written, {path.name: files.digest(path) for path in writing.written()}, prepared.result()[1])

        parts = crew.gather(Outcome(write))
        return crew.from_first(lambda: self._commit(folder, writing, crew.whole(parts), step, keep))

    def _commit(self, folder: Path, writing: Writing, parts: list[_Part], step: int, keep: int | None) -> Path:
        """On the first process: what all wrote becomes a checkpoint."""
        description = writing.finish([part.written for part in parts])
        run = parts[0].run | {"generators": [part.run["generators"] for part in parts]}
        for key in ("fields", "values", "options"):
            run[key] = {name: value for part in parts for name, value in part.run[key].items()}
        with open(folder / files.RUN, "wb") as file:
            torch.save(run, file)
            file.flush()
            os.fsync(file.fileno())
        found = {name: digest for part in parts for name, digest in part.files.items()}
        for path in (description, folder / files.RUN):
            found[path.name] = files.digest(path)
        return files.commit(folder, Manifest(step, found, self._made_with | {"processes": str(len(parts))}), keep)

    # Resuming

    def resume(
        self, directory: str | Path, optimizer: torch.optim.Optimizer | None, scheduler: Any, step: int | None
    ) -> Resumed | None:
        self.finish()
        _check(directory, optimizer, step if step is not None else 0, scheduler, None)
        crew = self._crew
        found = crew.from_first(lambda: files.candidates(Path(directory)))
        if step is not None:
            found = [path for path in found if files.step_of(path) == step]
            if not found:
                raise CheckpointError(f"{directory} has a checkpoint of step {step}", got="none", fix="choose another")
        problems = []
        for path in found:
            try:
                return self._load(path, optimizer, scheduler)
            except CheckpointError as error:
                if len(found) == 1:
                    raise
                problems.append(f"{path.name}: {error.rule}, not {error.got}")
                if len(problems) < len(found) and crew.leads:
                    warnings.warn(f"{path} is passed over: {error}", CheckpointWarning, stacklevel=3)
        if problems:
            raise CheckpointError(
                f"one of the checkpoints in {directory} is whole",
                got="; ".join(problems),
                fix="start from another folder, or without resuming",
            )
        return None

    def _load(self, path: Path, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Resumed:
        """Load one checkpoint, on all processes or on none."""
        crew = self._crew

        def prepare() -> tuple[dict[str, Any], dict[str, Tensor], OptimizerState]:
            manifest = files.read_manifest(path)
            files.verify(path, manifest, crew.rank, crew.size)
            run = _read_run(path, manifest)
            description = read_description(path / METADATA, manifest.files)
            state = OptimizerState(values=run["values"], options=run["options"])
            fields: dict[str, list[str]] = {}
            if optimizer is not None:
                _optimizer_state.take(optimizer, self._names())  # that all its parameters are known here
                known = [_optimizer_state.known_name(name, state, self._ties) for name in self._names().values()]
                fields = {name: run["fields"][name] for name in known}
            wanted = [f"model.{name}" for name in self._model()]
            wanted += [f"optimizer.{name}.{key}" for name, keys in fields.items() for key in keys]
            loaded = read(Reader(path, manifest.files), description, wanted)
            _check_shapes(self._model(), loaded)
            state.tensors = {
                name: {key: loaded[f"optimizer.{name}.{key}"] for key in keys} for name, keys in fields.items()
            }
            return run, loaded, state

        outcome = Outcome(prepare)
        crew.agree(lambda: outcome.result() and None)
        run, loaded, state = outcome.result()
        with torch.no_grad():
            for name, tensor in self._model().items():
                tensor.copy_(loaded[f"model.{name}"])
        if optimizer is not None:
            _optimizer_state.give(optimizer, self._names(), state, self._ties)
        if scheduler is not None and run["scheduler"] is not None:
            scheduler.load_state_dict(run["scheduler"])
        _rng.give_one_of(run["generators"], crew.rank, crew.size)
        return Resumed(run["step"], run["data"], path)

    # Names

    def _model(self) -> dict[str, Tensor]:
        """This process's parameters and buffers, by the whole model's names."""
        return {
            prefix + name: tensor for prefix, module in self._stages for name, tensor in module.state_dict().items()
        }

    def _names(self) -> dict[int, str]:
        """The name of each parameter of this process, by its id; the first, where it has several."""
        names: dict[int, str] = {}
        for prefix, module in self._stages:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names


def _with_prefixes(stages: Mapping[int, nn.Module], whole: bool, crew: Crew) -> list[tuple[str, nn.Module]]:
    """Stages with what makes their names the whole model's: nothing, unless two stages have the same ones.

    Then a stage's index comes first, as if the stages were one ``nn.Sequential``.
    """
    held = crew.share({index: list(stage.state_dict()) for index, stage in stages.items()})
    by_stage = {index: names for part in held for index, names in part.items()}
    names = [name for part in by_stage.values() for name in part]
    plain = whole or len(names) == len(set(names))
    return [("" if plain else f"{index}.", stages[index]) for index in sorted(stages)]


def _check(directory: Any, optimizer: Any, step: Any, scheduler: Any, keep: Any) -> None:
    """What is passed is of the right kind."""
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
            "a checkpoint takes a folder, an optimizer or None, a step from 0 on, a scheduler or None, keep from 1 on",
            got=problem,
            fix='write pipe.save("checkpoints", optimizer, step, keep=3)',
        )


def _frozen(run: dict[str, Any]) -> dict[str, Any]:
    """A copy that can be read back without running code; an error now rather than when it is needed."""
    file = io.BytesIO()
    try:
        torch.save(run, file)
        file.seek(0)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]  # what was put in
    except Exception as error:  # pickle raises what the object's own code raises
        raise CheckpointError(
            "data, schedulers and optimizers are saved as numbers, text, tensors and containers of them",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="pass data as such, and load other objects from it yourself",
        ) from None


def _read_run(path: Path, manifest: Manifest) -> dict[str, Any]:
    keys = {"step", "data", "scheduler", "generators", "fields", "values", "options"}
    run: dict[str, Any] = {}
    try:
        with open(path / files.RUN, "rb") as file:
            if file.read(4) != _ZIP:  # torch reads others, too, with a warning of its own
                raise ValueError("no file of torch.save")
        run = torch.load(path / files.RUN, map_location="cpu", weights_only=True)
        whole = isinstance(run, dict) and run.keys() == keys and run["step"] == manifest.step and run["generators"]
        problem = "" if whole else "other entries"
    except Exception as error:  # an unpickler may raise anything on bytes that are no pickle
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        raise CheckpointError(
            f"{path.name}/{files.RUN} holds {', '.join(sorted(keys))}", got=problem, fix="remove that checkpoint"
        )
    return run


def _check_shapes(model: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    for name, tensor in model.items():
        saved = loaded[f"model.{name}"]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"{name} has the shape it was saved with, {tuple(saved.shape)}",
                got=str(tuple(tensor.shape)),
                fix="resume the same model",
            )
