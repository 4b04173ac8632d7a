"""``from_pretrained``: a pipeline from a checkpoint of transformers, of which each process reads its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway.pipeline._pipeline import Pipeline
from sternway.pipeline.pretrained._empty import empty_model
from sternway.pipeline.pretrained._files import CheckpointFolder
from sternway.pipeline.pretrained._prepare import prepared
from sternway.pipeline.pretrained._read import read_tensors


def from_pretrained(
    path: str | Path,
    *,
    sample: dict[str, Any],
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    prepare: Callable[[Any], nn.Module] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline from a checkpoint of transformers. No process has the whole model in memory.

    The model is made without memory from the checkpoint's configuration and cut into stages. Then each process reads
    the tensors of its own stages from the safetensors files.

    Example, one process of several started by torchrun:
        >>> pipe = from_pretrained("llama-8b", sample=microbatch, schedule="zb-h1", n_microbatches=8,
        ...                        device="cuda")                                          # doctest: +SKIP
        >>> pipe.step(input_ids=ids, attention_mask=mask, labels=labels)                 # doctest: +SKIP
        >>> pipe.save_pretrained("llama-8b-tuned")                                       # doctest: +SKIP

    Args:
        path: a folder with ``config.json`` and safetensors files.
        sample: keyword arguments of the model, one row or more, to find out what the forward calls. It is run once
            on the CPU of the first process, with zeros for weights, so keep it short.
        model_class: a class of transformers, also an ``AutoModel…`` one; the one in the configuration by default.
        dtype: of the parameters; the one in the configuration by default.
        device: where this process's stages are.
        prepare: changes the model before it is cut, and returns it: ``lambda model: get_peft_model(model, config)``.
            It must not need the values of weights.
        options: those of ``Pipeline``.

    Raises:
        PipelineError: on every rank, if the checkpoint is not complete, or the model cannot be cut.
    """
    folder = CheckpointFolder(path)
    plain = empty_model(folder, model_class, dtype).train()
    if prepare is None:
        model, known = plain, {name: name for name in plain.state_dict()}
    else:
        model, known = prepared(plain, prepare)
        plain = empty_model(folder, model_class, dtype)

    def weights(names: Sequence[str]) -> dict[str, Tensor]:
        found = read_tensors(folder, plain, [known[name] for name in names])
        return {name: found[known[name]] for name in names}

    pipe = Pipeline(model, sample=sample, weights=weights, device=device, **options)
    pipe._source = folder.path
    return pipe
