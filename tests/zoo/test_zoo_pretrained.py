"""Checkpoints of transformers, read by parts: as ``from_pretrained`` of transformers reads them whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from sternway.errors import PipelineError
from sternway.pipeline.pretrained._empty import empty_model
from sternway.pipeline.pretrained._files import CheckpointFolder
from sternway.pipeline.pretrained._read import read_tensors
from zoo import transformers_models
from zoo.models import MODELS

NAMES = [entry.name for entry in transformers_models.ENTRIES]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("name", NAMES)
def test_all_tensors_and_half_of_them(name: str, tmp_path: Path) -> None:
    model = MODELS[name].make()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = type(model).from_pretrained(tmp_path)
    folder = CheckpointFolder(tmp_path)
    empty = empty_model(folder)
    assert all(parameter.is_meta for parameter in empty.parameters())
    state = theirs.state_dict()
    for names in (list(state), list(state)[::2]):
        found = read_tensors(folder, empty, names)
        assert list(found) == names
        for key, tensor in found.items():
            assert torch.equal(tensor, state[key]), key
    expected = dict(theirs.named_buffers())
    for key, buffer in empty.named_buffers():  # those that no file has: rotary frequencies, position ids
        if key not in state:
            assert torch.equal(buffer, expected[key]), key


def test_only_the_files_of_the_wanted_tensors_are_opened(tmp_path: Path) -> None:
    MODELS["mixtral"].make().save_pretrained(tmp_path, max_shard_size="20KB")
    folder = CheckpointFolder(tmp_path)
    wanted = ["model.layers.1.mlp.experts.gate_up_proj"]
    needed = {file for key, file in folder.file_of.items() if ".layers.1." in key and ("w1" in key or "w3" in key)}
    others = set(folder.file_of.values()) - needed
    assert needed
    assert others
    for file in others:
        (tmp_path / file).unlink()
    assert read_tensors(folder, empty_model(folder), wanted)[wanted[0]].shape[0] == 4


def test_another_dtype(tmp_path: Path) -> None:
    MODELS["llama"].make().save_pretrained(tmp_path)
    folder = CheckpointFolder(tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    empty = empty_model(folder, transformers.AutoModelForCausalLM, torch.bfloat16)
    for key, tensor in read_tensors(folder, empty, list(theirs)).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[key])


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"must be a folder with a config.json; got .*snapshot_download"):
        CheckpointFolder(tmp_path)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    MODELS["llama"].make().config.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=r"must have model.safetensors, .*; got config.json"):
        CheckpointFolder(tmp_path)


def test_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    MODELS["bert"].make().bert.save_pretrained(tmp_path)
    folder = CheckpointFolder(tmp_path)
    model = empty_model(folder, transformers.BertForSequenceClassification)
    assert set(read_tensors(folder, model, ["bert.embeddings.word_embeddings.weight"]))
    with pytest.raises(PipelineError, match=r"every tensor of the model; got none for classifier.bias and 1 others"):
        read_tensors(folder, model, ["classifier.weight", "classifier.bias"])


def test_another_shape_than_the_configuration_says(tmp_path: Path) -> None:
    MODELS["llama"].make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(PipelineError, match=r"embed_tokens.weight in the shape \[65, 16\].*got \[64, 16\]"):
        read_tensors(folder, empty_model(folder), ["model.embed_tokens.weight"])
