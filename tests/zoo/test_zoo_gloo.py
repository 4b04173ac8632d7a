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
from zoo.entry import Entry
from zoo.models import MODELS
from zoo.steps import MICROBATCHES, ROWS, assert_steps_equal, make_pipeline, step

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
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (pipe, reference)]
    for optimizer in optimizers:
        optimizer.step()
    pipe.save_pretrained(folder / "tuned")
    if rank == 0:
        if adapters:
            import peft

            base = type(whole).from_pretrained(folder / "base")
            loaded = peft.PeftModel.from_pretrained(base, str(folder / "tuned"))
            assert not (folder / "tuned" / "model.safetensors.index.json").exists()
        else:
            loaded = type(whole).from_pretrained(folder / "tuned")
            assert (folder / "tuned" / "tokenizer_config.json").read_text() == "{}"
            assert len(list((folder / "tuned").glob("*.safetensors"))) == 2
        expected = reference.state_dict()
        for key, value in loaded.state_dict().items():
            torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")
    dist.barrier()
    pipe.close()


@pytest.mark.parametrize(
    ("name", "adapters"), [("llama", False), ("gpt2-tied", False), ("mixtral", False), ("t5-tied", False), ("llama", True)]
)
def test_from_pretrained_and_back(name: str, adapters: bool, tmp_path: Path) -> None:
    MODELS[name].make().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    on_ranks(2, load_train_save, name, tmp_path, adapters)


def lose_a_file(rank: int, folder: Path) -> None:
    with pytest.raises(pipeline_error(), match="a process could not do its part|No such file|every tensor"):
        from_pretrained(folder, MODELS["llama"])


def pipeline_error() -> type[Exception]:
    from sternway.errors import PipelineError

    return PipelineError


def test_a_missing_file_is_an_error_on_both(tmp_path: Path) -> None:
    MODELS["llama"].make().save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("model-*.safetensors"))[-1].unlink()
    on_ranks(2, lose_a_file, tmp_path)
