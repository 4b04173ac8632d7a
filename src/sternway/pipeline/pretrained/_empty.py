"""A model without its weights: parameters on the meta device, buffers as they are computed.

Buffers that are not saved (the frequencies of rotary embeddings, position ids) are computed while a model is made, so
they must not be on meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sternway.errors import PipelineError
from sternway.pipeline.pretrained._files import CheckpointFolder
from sternway.pipeline.pretrained._libraries import library


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules get in this block are on the meta device: they have shapes and no memory."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # leave it; one that is assigned twice, a tied one, stays one
        empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        vars(empty).update(vars(parameter))
        return empty

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def empty_model(folder: CheckpointFolder, model_class: Any = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a checkpoint, without its weights.

    Args:
        folder: has the configuration.
        model_class: a class of transformers, also an ``AutoModel…`` one; the configuration's by default.
        dtype: of the parameters; the configuration's by default.
    """
    transformers = library("transformers")
    config = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise PipelineError(
            "a quantized checkpoint cannot be loaded by parts", got=str(folder.path), fix="load it with transformers"
        )
    if model_class is None:
        names = config.architectures or []
        model_class = getattr(transformers, names[0], None) if names else None
        if model_class is None:
            raise PipelineError(
                "the configuration must name a class of transformers",
                got=f"architectures={names}",
                fix="pass model_class=",
            )
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if make is None:
        raise PipelineError(
            "model_class must be a class of transformers", got=repr(model_class), fix="pass AutoModelForCausalLM"
        )
    options = {} if dtype is None else {"dtype": dtype}
    with parameters_on_meta():
        model: nn.Module = make(config, **options)
    if getattr(model, "can_generate", lambda: False)():
        model.generation_config = _generation_config(transformers, folder, model)
    return model


def _generation_config(transformers: Any, folder: CheckpointFolder, model: Any) -> Any:
    if (folder.path / "generation_config.json").is_file():
        return transformers.GenerationConfig.from_pretrained(folder.path, local_files_only=True)
    return model.generation_config
