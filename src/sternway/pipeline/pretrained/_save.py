"""Write a checkpoint that transformers and PEFT load: each process writes its own tensors, the first one the rest."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sternway._torch.tensors import storage_id
from sternway.errors import PipelineError
from sternway.pipeline.pretrained._files import INDEX, WEIGHTS
from sternway.pipeline.pretrained._libraries import library
from sternway.pipeline.transport._crew import Crew

_PARTS = ".parts"
_SHARDS = "model*.safetensors*"  # also the index
_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""What belongs to a checkpoint beside its weights: tokenizers, templates, code."""


def save_model(
    path: str | Path, crew: Crew, model: nn.Module | None, state: Mapping[str, Tensor], source: Path | None = None
) -> None:
    """Write a checkpoint. Every process calls it.

    Args:
        path: the folder.
        crew: the processes.
        model: the whole model, a ``PreTrainedModel`` or a ``PeftModel``, of which only the adapters are written. Its
            parameters need not be here.
        state: this process's tensors, by their names in the whole model.
        source: the checkpoint that the model was loaded from; tokenizer files and the like are copied from there.

    Raises:
        PipelineError: on every process, if one cannot write.
    """
    PipelineError.unless(isinstance(path, str | Path), "path must be a folder", path, "pass the folder to write to")
    if not hasattr(model, "save_pretrained"):
        raise PipelineError(
            "save_pretrained needs a model of transformers or PEFT",
            got=type(model).__name__,
            fix="use pipe.save, which saves any model",
        )
    folder = Path(path)
    if hasattr(model, "peft_config"):
        _save_adapters(folder, crew, model, dict(state))
        return
    crew.from_first(lambda: _clean(folder))
    crew.agree(lambda: _write_part(folder / _PARTS / f"{crew.rank:05}.safetensors", model, state))
    crew.from_first(lambda: _join(folder, model, source))


def _clean(folder: Path) -> None:
    shutil.rmtree(folder / _PARTS, ignore_errors=True)
    (folder / _PARTS).mkdir(parents=True)


def _write_part(file: Path, model: Any, state: Mapping[str, Tensor]) -> None:
    """This process's tensors, with the names and shapes that checkpoints of this model have."""
    left_out = {*(getattr(model, "all_tied_weights_keys", None) or ()), *(model._keys_to_ignore_on_save or ())}
    own = {name: tensor.detach() for name, tensor in state.items() if name not in left_out}
    converted = library("transformers.core_model_loading").revert_weight_conversion(model, own)
    if converted:
        seen: set[int] = set()
        for name, tensor in converted.items():
            whole = tensor.cpu().contiguous()
            converted[name] = whole.clone() if storage_id(whole) in seen else whole  # safetensors has no aliases
            seen.add(storage_id(converted[name]))
        library("safetensors.torch").save_file(converted, file, metadata={"format": "pt"})


def _join(folder: Path, model: Any, source: Path | None) -> None:
    """Make one checkpoint of all parts; the index comes last."""
    for old in folder.glob(_SHARDS):
        old.unlink()
    if source is not None and source.resolve() != folder.resolve():
        for pattern in _BESIDE:
            for file in source.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    files = sorted((folder / _PARTS).iterdir())
    if len(files) == 1:
        files[0].replace(folder / WEIGHTS)
    else:
        _move_shards(folder, files)
    shutil.rmtree(folder / _PARTS)


def _move_shards(folder: Path, files: list[Path]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with library("safetensors").safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                weight_map[key] = name
        with file.open("rb") as opened:  # the file is the length of its header, the header, and the tensors
            total += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
        file.replace(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save_adapters(folder: Path, crew: Crew, model: Any, state: dict[str, Tensor]) -> None:
    """Adapters are small: the first process writes those of all."""
    peft = library("peft")

    def own() -> dict[str, Tensor]:
        ids = {
            id(tensor)
            for adapter in model.peft_config
            for tensor in peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values()
        }
        return {name: tensor.detach().cpu() for name, tensor in state.items() if id(tensor) in ids}

    rows = crew.gather(crew.attempt(own))

    def write() -> None:
        joined = {name: tensor for row in crew.results(rows) for name, tensor in row.items()}
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=joined)

    crew.from_first(write)
