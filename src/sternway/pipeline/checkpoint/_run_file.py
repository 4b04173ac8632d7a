"""The file ``run.pt`` of a checkpoint: everything that is not a tensor by name. No code runs when it is loaded."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sternway.errors import CheckpointError
from sternway.pipeline.checkpoint._files import RUN, Manifest

KEYS = {"step", "data", "scheduler", "generators", "fields", "values", "options"}
LATER = {"passes"}
"""What older checkpoints do not have."""
_ZIP = b"PK\x03\x04"


def freeze(run: dict[str, Any]) -> dict[str, Any]:
    """A copy that can be loaded without running code; raises now if that is not possible."""
    file = io.BytesIO()
    try:
        torch.save(run, file)
        file.seek(0)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]  # what was put in
    except Exception as error:  # pickle raises what the object's own code raises
        raise CheckpointError(
            "only numbers, text, tensors and containers of them can be saved as data and as state of schedulers",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="convert other objects before saving, and back after resuming",
        ) from None


def read_run(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Read ``run.pt``.

    Raises:
        CheckpointError: if it does not hold what it should.
    """
    run: dict[str, Any] = {}
    try:
        with open(path / RUN, "rb") as file:
            if file.read(4) != _ZIP:  # torch also reads an older format, with a warning
                raise ValueError("not a file of torch.save")
        run = torch.load(path / RUN, map_location="cpu", weights_only=True)
        whole = isinstance(run, dict) and run.keys() - LATER == KEYS
        whole = whole and run["step"] == manifest.step and run["generators"]
        problem = "" if whole else "other entries"
    except Exception as error:  # an unpickler may raise anything on bytes that are no pickle
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        raise CheckpointError(
            f"{path.name}/{RUN} must hold {', '.join(sorted(KEYS))}", got=problem, fix="remove that checkpoint"
        )
    return run


def write_run(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write the ``run.pt`` of all processes, given what each froze."""
    run = runs[0] | {"generators": [each["generators"] for each in runs]}
    for key in ("fields", "values", "options"):
        run[key] = {name: value for each in runs for name, value in each[key].items()}
    with open(path, "wb") as file:
        torch.save(run, file)
        file.flush()
        os.fsync(file.fileno())
