"""Read some tensors of a checkpoint, by the names that the model has for them.

Files may have other names and other shapes than the model: transformers renames, stacks experts, splits and joins
projections while it loads. That is its own knowledge, so its own loader does it here, on a copy of the model on the
meta device, with just the tensors that the wanted ones are made of.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline.pretrained._files import CheckpointFolder
from sternway.pipeline.pretrained._libraries import library


def read_tensors(folder: CheckpointFolder, model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Parameters and buffers of a model from its checkpoint.

    Args:
        folder: the checkpoint.
        model: made by ``empty_model`` from the same folder.
        names: of parameters and persistent buffers, as in the model's state.

    Raises:
        PipelineError: if the checkpoint does not have one of them, or in another shape.
    """
    loading, utils = library("transformers.core_model_loading"), library("transformers.modeling_utils")
    mapping = library("transformers.conversion_mapping").get_model_conversion_mapping(model)
    scratch = _scratch(model)
    with folder.tensors(_keys(folder, model, mapping, _with_tied(model, set(names)))) as tensors:
        info, _ = loading.convert_and_load_state_dict_in_model(
            scratch, tensors, utils.LoadStateDictConfig(weight_mapping=mapping)
        )
    if info.mismatched_keys:
        name, got, expected = sorted(info.mismatched_keys)[0]
        raise PipelineError(
            f"the checkpoint must have {name} in the shape {list(expected)}, as its configuration says",
            got=str(list(got)),
            fix="use the configuration that belongs to the weights",
        )
    _compute_unsaved(scratch, names)
    state = scratch.state_dict(keep_vars=True)
    found = {name: _of_tie(model, state, name) for name in names}
    missing = sorted(name for name, value in found.items() if value.is_meta)
    if missing:
        raise PipelineError(
            "the checkpoint must have every tensor of the model",
            got=f"none for {missing[0]}" + (f" and {len(missing) - 1} others" if len(missing) > 1 else ""),
            fix="load it once with transformers, which makes new ones, and save it",
        )
    return {name: value.detach() for name, value in found.items()}


def _scratch(model: nn.Module) -> nn.Module:
    """The model with everything on meta, for the loader to fill in."""
    memo = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _keys(folder: CheckpointFolder, model: Any, mapping: list[Any], wanted: set[str]) -> list[str]:
    """The tensors of the checkpoint that the wanted ones are made of."""
    loading = library("transformers.core_model_loading")
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    targets = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    keys = []
    for key in folder.file_of:
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        made = [] if pattern is None else [name.replace(targets[pattern][0], other) for other in targets[pattern]]
        if wanted.intersection((key, name, *made)):
            keys.append(key)
    return keys


def _compute_unsaved(model: Any, names: Collection[str]) -> None:
    """Give their values to parameters that are never saved because they can be computed, such as sine waves."""
    patterns = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name in names:
        if any(re.search(pattern, name) for pattern in patterns) and model.get_parameter(name).is_meta:
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.to_empty(device="cpu", recurse=False)
            model._init_weights(owner)


def _tied_to(model: Any) -> dict[str, str]:
    """For each name that is tied to another one, that one: the checkpoint has only the latter."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _with_tied(model: nn.Module, names: set[str]) -> set[str]:
    tied = _tied_to(model)
    return names | {tied[name] for name in names if name in tied}


def _of_tie(model: nn.Module, state: dict[str, Tensor], name: str) -> Tensor:
    value = state[name]
    return state[_tied_to(model).get(name, name)] if value.is_meta else value
