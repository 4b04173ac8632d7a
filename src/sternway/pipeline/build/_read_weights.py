"""``read_weights``: tensors by name from safetensors files, of which a process reads those that it needs.

A file is a length in eight bytes, a JSON header of that length with dtype, shape and place of each tensor, and then the
tensors' bytes. That is little enough to read without a library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.build._weights import Weights

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_HEADER_LIMIT = 2**27


def read_weights(path: str | Path) -> Weights:
    """A function for ``Pipeline(weights=…)`` that reads tensors from safetensors files.

    Each process reads the tensors of its own stages, and opens no other file.

    Example:
        >>> with torch.device("meta"):                                               # doctest: +SKIP
        ...     model = MyModel()
        >>> pipe = Pipeline(model, weights=read_weights("folder"), sample=row)        # doctest: +SKIP

    Args:
        path: a folder with ``model.safetensors.index.json`` and the files that it names, or with ``model.safetensors``;
            or one file. Names are those of the model.

    Raises:
        PipelineError: if there are no such files; when the tensors are read, if one is not there.
    """
    PipelineError.unless(isinstance(path, str | Path), "path must be a folder or a file", path, "pass one")
    folder = Path(path)
    file_of = _files(folder)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        missing = [name for name in names if name not in file_of]
        if missing:
            raise PipelineError(
                "the files must have every tensor of the model's state",
                got=f"none for {missing[0]}" + (f" and {len(missing) - 1} others" if len(missing) > 1 else ""),
                fix="pass the files of this model; make buffers that are not saved on another device than meta",
            )
        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(file_of[name] for name in names):
            found |= _read(file, [name for name in names if file_of[name] == file])
        return found

    return read


def _files(path: Path) -> dict[str, Path]:
    """The file that has each tensor."""
    index, whole = path / INDEX, path / WHOLE
    if index.is_file():
        try:
            return {name: path / Path(file).name for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from None
    file = whole if whole.is_file() else path
    if not file.is_file():
        raise PipelineError(
            f"weights must be in {WHOLE}, or in several files and {INDEX}", got=str(path), fix="pass their folder"
        )
    return dict.fromkeys(_header(file)[0], file)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The description of each tensor of a file, and where their bytes begin."""
    try:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(_HEADER_LIMIT, file.stat().st_size):
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            return header, 8 + size
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _unreadable(file, error) from None


def _read(file: Path, names: Sequence[str]) -> dict[str, Tensor]:
    header, begin = _header(file)
    found = {}
    with open(file, "rb") as opened:
        for name in names:
            try:
                entry = header[name]
                dtype, shape, (start, end) = _DTYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
                opened.seek(begin + start)
                content = bytearray(opened.read(end - start))
                tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
                found[name] = tensor.reshape(shape)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise _unreadable(file, error, f"{name}, ") from None
    return found


def _unreadable(file: Path, error: Exception, what: str = "") -> PipelineError:
    return PipelineError(
        "a file of weights cannot be read",
        got=f"{what}{file}: {type(error).__name__}: {error}",
        fix="write or download it again",
    )
