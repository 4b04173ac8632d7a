"""Models of the zoo on two real processes: each has its own part, and the gradients of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from gloo import on_ranks
from sternway import pipeline
from sternway.errors import PipelineError
from zoo.entry import Entry
from zoo.models import MODELS
from zoo.steps import MICROBATCHES, assert_steps_equal, make_pipeline

NAMES = ["llama", "gpt2-tied", "mixtral", "t5-tied", "bert", "timm-test_byobnet", "unet-condition", "lora-llama"]


def train(rank: int, schedule: str) -> None:
    for name in NAMES:
        entry = MODELS[name]
        model = entry.make()
        reference = copy.deepcopy(model)
        pipe = make_pipeline(entry, model, schedule)
        assert_steps_equal(pipe, entry, reference)
        here = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
        assert here < sum(parameter.nbytes for parameter in reference.parameters()), name  # the rest is freed
        pipe.close()


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_equals_a_plain_backward(schedule: str) -> None:
    on_ranks(2, train, schedule)


def lora(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    return adapted


def from_pretrained(path: Path, entry: Entry, **options: Any) -> pipeline.Pipeline:
    return pipeline.from_pretrained(
        path, sample=entry.data(1)[0], schedule="zb-v", n_microbatches=MICROBATCHES, **options
    )


def load_train_save(rank: int, name: str, folder: Path, adapters: bool) -> None:
    transformers.utils.logging.disable_progress_bar()
    entry = MODELS[name]
    pipe = from_pretrained(folder / "base", entry, prepare=lora if adapters else None)
    whole = type(entry.make()).from_pretrained(folder / "base")
    reference = lora(whole) if adapters else whole
    assert_steps_equal(pipe, entry, reference.train())
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (pipe, reference)
    ]
    for optimizer in optimizers:
        optimizer.step()
    pipe.save_pretrained(folder / "tuned")
    with pytest.raises(PipelineError, match="generate needs the whole model in one process; got a pipeline over 2"):
        pipe.generate(input_ids=torch.tensor([[3]]))
    if rank == 0:
        if adapters:
            import peft

            base = type(whole).from_pretrained(folder / "base")
            loaded = peft.PeftModel.from_pretrained(base, str(folder / "tuned"))
            assert not (folder / "tuned" / "model.safetensors.index.json").exists()
        else:
            loaded = type(whole).from_pretrained(folder / "tuned")
            assert (folder / "tuned" / "tokenizer_config.json").read_text() == "{}"
            files = sorted(file.name for file in (folder / "tuned").rglob("*"))
            assert sum(name.endswith(".safetensors") for name in files) == 2, files
        expected = reference.state_dict()
        for key, value in loaded.state_dict().items():
            torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")
    dist.barrier()
    pipe.close()


NAMES_ON_DISK = ["llama", "gpt2-tied", "mixtral", "t5-tied"]


def load_train_save_all(rank: int, folder: Path) -> None:
    for name in NAMES_ON_DISK:
        load_train_save(rank, name, folder / name, adapters=False)


def make_checkpoint(name: str, folder: Path) -> None:
    MODELS[name].make().save_pretrained(folder / "base", max_shard_size="20KB")
    (folder / "base" / "tokenizer_config.json").write_text("{}")


def test_from_pretrained_and_back(tmp_path: Path) -> None:
    for name in NAMES_ON_DISK:
        make_checkpoint(name, tmp_path / name)
    on_ranks(2, load_train_save_all, tmp_path)


def test_adapters_on_a_model_without_weights(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    on_ranks(2, load_train_save, "llama", tmp_path, True)


def lose_a_file(rank: int, folder: Path) -> None:
    with pytest.raises(PipelineError, match="a file of the checkpoint cannot be read"):
        from_pretrained(folder, MODELS["llama"])


def test_a_missing_file_is_an_error_on_both(tmp_path: Path) -> None:
    MODELS["llama"].make().save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("model-*.safetensors"))[-1].unlink()
    on_ranks(2, lose_a_file, tmp_path)
