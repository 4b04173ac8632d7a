"""A folder of checkpoints: each is whole or is not there, and one that was damaged is known to be.

    runs/a/
      step-00000200/          a whole checkpoint
        manifest.json           every other file's length and SHA-256; written last
        run.pt                  the step, the data position, schedulers, generators: torch.load(weights_only=True)
        .metadata, *.distcp     tensors by name, as torch.distributed.checkpoint writes them
      step-00000300.tmp/      being written, or left by a run that died; never read
      step-00000200.old/      one that is being replaced or removed; read if nothing better is there

A checkpoint is written under its ``.tmp`` name and renamed when every file is on the disk, so that a death at any
moment leaves either the new one or what was there before.
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
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


@dataclass(frozen=True, slots=True)
class File:
    """What a file must be like."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in a checkpoint, and how it came about."""

    step: int
    files: dict[str, File]
    made_with: dict[str, str]


def digest(path: Path) -> File:
    """A file's length and SHA-256."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), found)


def begin(directory: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into.

    Raises:
        CheckpointError: a place that cannot be written to.
    """
    folder = directory / f"step-{step:08d}.tmp"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            "checkpoints go into a folder that can be written to", got=str(error), fix="choose another"
        ) from None
    return folder


def commit(folder: Path, manifest: Manifest, keep: int | None) -> Path:
    """Make a written checkpoint count: manifest, rename, and only then remove what is old."""
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
    with suppress(OSError):  # what is old and cannot be removed is in nobody's way
        prune(final.parent, manifest.step, keep)
    return final


def prune(directory: Path, newest: int, keep: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints up to step ``newest``; set aside those of a future that was undone.

    What a run that died left half-written goes too.
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
    """Everything that may be a whole checkpoint, newest first; what was set aside comes last."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            "checkpoints are in a folder that can be read", got=str(error), fix="check the path"
        ) from None
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (match[2] or "", -int(match[1])))
    return [directory / match[0] for match in matches]


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, if it is one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        CheckpointError: none, or one that is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"a manifest has format {FORMAT}", got=repr(content["format"]), fix="use the Sternway that wrote it"
            )
        manifest = Manifest(
            step=_whole(content["step"]),
            files={_plain(name): File(_whole(f["bytes"]), _text(f["sha256"])) for name, f in content["files"].items()},
            made_with={_text(key): _text(value) for key, value in content["made_with"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder.name} has a manifest that says what is in it",
            got=f"{type(error).__name__}: {error}",
            fix="remove that checkpoint",
        ) from None
    if step_of(folder) != manifest.step:
        raise CheckpointError(
            "a checkpoint's name has the step of its manifest",
            got=f"{folder.name} and step {manifest.step}",
            fix="name it as it was",
        )
    return manifest


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th file with the manifest, from the ``part``-th.

    Raises:
        CheckpointError: a file that is missing, shorter, longer or other than it was.
    """
    for name in sorted(manifest.files)[part::parts]:
        wanted = manifest.files[name]
        try:
            size = (folder / name).stat().st_size
            found = digest(folder / name) if size == wanted.bytes else None
        except OSError as error:
            raise CheckpointError(
                f"{folder.name} has every file of its manifest", got=str(error), fix="remove that checkpoint"
            ) from None
        if found != wanted:
            got = f"{name} of {size} bytes, not {wanted.bytes}" if found is None else f"{name} with other bytes"
            raise CheckpointError(
                f"the files of {folder.name} are as they were written", got=got, fix="remove that checkpoint"
            )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} where a number from 0 on belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where text belongs")
    return value


def _plain(name: str) -> str:
    """A file's name, which leads nowhere else."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} where a file's name belongs")
    return name


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # a system on which a folder cannot be opened
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
