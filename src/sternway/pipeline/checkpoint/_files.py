"""A folder of checkpoints. Each is complete or is not there, and damage is noticed.

    runs/a/
      step-00000200/          a complete checkpoint
        manifest.json           the length and SHA-256 of every other file; written last
        run.pt                  the step, the data position, scheduler, generators: torch.load(weights_only=True)
        .metadata, *.distcp     tensors by name, as torch.distributed.checkpoint writes them
      step-00000300.tmp/      being written, or left by a run that died; never read
      step-00000200.old/      being replaced or removed; read if there is nothing better

A checkpoint is written under its ``.tmp`` name, and renamed when every file is on the disk. So a process that dies at
any moment leaves either the new checkpoint or what was there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sternway.errors import CheckpointError

MANIFEST, RUN = "manifest.json", "run.pt"
FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


@dataclass(frozen=True, slots=True)
class File:
    """The length and hash that a file must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint, and the versions that wrote it."""

    step: int
    files: dict[str, File]
    made_with: dict[str, str]


def digest(path: Path) -> File:
    """The length and SHA-256 of a file."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), found)


def begin(directory: Path, step: int) -> Path:
    """Make an empty folder to write a checkpoint into.

    Raises:
        CheckpointError: if that fails.
    """
    folder = directory / f"step-{step:08d}.tmp"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            "the folder for checkpoints cannot be written to", got=str(error), fix="choose another one"
        ) from None
    return folder


def commit(folder: Path, manifest: Manifest, keep: int | None) -> Path:
    """Complete a checkpoint: write the manifest, rename the folder, and only then remove old checkpoints."""
    content = {"format": FORMAT, **asdict(manifest)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    final = folder.with_suffix("")
    if final.exists():
        _set_aside(final)
    folder.rename(final)
    _sync(final.parent)
    shutil.rmtree(folder.with_suffix(".old"), ignore_errors=True)
    with suppress(OSError):  # an old checkpoint that cannot be removed does no harm
        prune(final.parent, manifest.step, keep)
    return final


def prune(directory: Path, newest: int, keep: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints up to step ``newest``, and set later ones aside as ``.old``.

    Later ones exist if training went back to an earlier step. What a run that died left incomplete is removed, too.
    """
    for path in directory.glob("step-*.tmp"):
        if step_of(path.with_suffix("")) is not None and path.name != f"step-{newest:08d}.tmp":
            shutil.rmtree(path, ignore_errors=True)
    live = [path for path in candidates(directory) if path.suffix != ".old"]
    for path in live:
        if (step_of(path) or 0) > newest:
            _set_aside(path)
    if keep is not None:
        for path in [path for path in live if (step_of(path) or 0) <= newest][keep:]:
            _set_aside(path)
        for path in directory.glob("step-*.old"):
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> None:
    shutil.rmtree(path.with_suffix(".old"), ignore_errors=True)
    path.rename(path.with_suffix(".old"))


def candidates(directory: Path) -> list[Path]:
    """Everything that may be a complete checkpoint, newest first; ``.old`` ones come last."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            "the folder of checkpoints cannot be read", got=str(error), fix="check the path"
        ) from None
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (match[2] or "", -int(match[1])))
    return [directory / match[0] for match in matches]


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, or None if it is not such a name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"the manifest must have format {FORMAT}",
                got=repr(content["format"]),
                fix="use the version of Sternway that wrote it",
            )
        manifest = Manifest(
            step=_whole(content["step"]),
            files={_plain(name): File(_whole(f["bytes"]), _text(f["sha256"])) for name, f in content["files"].items()},
            made_with={_text(key): _text(value) for key, value in content["made_with"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder.name} has no readable manifest",
            got=f"{type(error).__name__}: {error}",
            fix="remove that checkpoint",
        ) from None
    if step_of(folder) != manifest.step:
        raise CheckpointError(
            "the name of a checkpoint must have the step of its manifest",
            got=f"{folder.name} and step {manifest.step}",
            fix="rename it to what it was",
        )
    return manifest


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th file with the manifest, beginning with the ``part``-th.

    Raises:
        CheckpointError: if a file is missing or has changed.
    """
    for name in sorted(manifest.files)[part::parts]:
        wanted = manifest.files[name]
        try:
            size = (folder / name).stat().st_size
            found = digest(folder / name) if size == wanted.bytes else None
        except OSError as error:
            raise CheckpointError(
                f"{folder.name} lacks a file of its manifest", got=str(error), fix="remove that checkpoint"
            ) from None
        if found != wanted:
            got = f"{name} of {size} bytes, not {wanted.bytes}" if found is None else f"{name} with other bytes"
            raise CheckpointError(
                f"a file of {folder.name} has changed since it was written", got=got, fix="remove that checkpoint"
            )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} where a number from 0 on is needed")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where text is needed")
    return value


def _plain(name: str) -> str:
    """``name``, if it is the name of a file in the same folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} where a file name is needed")
    return name


def _sync(folder: Path) -> None:
    """Write a folder's entries to the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # some systems cannot open a folder
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
