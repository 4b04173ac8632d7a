"""The files of a checkpoint of transformers: a configuration, and tensors in one safetensors file or several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sternway.errors import PipelineError
from sternway.pipeline.pretrained._libraries import library

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointFolder:
    """A folder that ``save_pretrained`` wrote.

    Attributes:
        path: the folder.
        file_of: for each tensor, the file that has it.
    """

    def __init__(self, path: str | Path) -> None:
        PipelineError.unless(
            isinstance(path, str | Path), "path must be a folder", path, "pass the checkpoint's folder"
        )
        self.path = Path(path)
        if not (self.path / CONFIG).is_file():
            raise PipelineError(
                f"a checkpoint must be a folder with a {CONFIG}",
                got=str(path),
                fix="download it first, as by huggingface_hub.snapshot_download",
            )
        self.file_of = self._find()

    def _find(self) -> Mapping[str, str]:
        index, whole = self.path / INDEX, self.path / WEIGHTS
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        if whole.is_file():
            with self._open(WEIGHTS) as file:
                return dict.fromkeys(file.keys(), WEIGHTS)
        raise PipelineError(
            f"a checkpoint must have {WEIGHTS}, or several such files and {INDEX}",
            got=", ".join(sorted(found.name for found in self.path.iterdir())),
            fix="load it with transformers, and save it again",
        )

    @contextmanager
    def tensors(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Tensors that are read when they are indexed (``[...]``), and no others. Only their files are opened."""
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            found = {}
            for name in names:
                file = self.file_of[name]
                if file not in opened:
                    opened[file] = stack.enter_context(self._open(file))
                found[name] = opened[file].get_slice(name)
            yield found

    def _open(self, file: str) -> Any:
        safetensors = library("safetensors")
        try:
            return safetensors.safe_open(self.path / file, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise PipelineError(
                "a file of the checkpoint cannot be read",
                got=f"{file}: {type(error).__name__}: {error}",
                fix="copy or download the checkpoint again",
            ) from error
