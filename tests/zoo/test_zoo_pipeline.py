"""Models that nobody here wrote, unmodified, through a pipeline: the loss, gradients and buffers of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import peft
import pytest
import torch
from torch import nn

from compare import assert_same_grads
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline
from zoo.entry import Entry
from zoo.models import MODELS
from zoo.steps import assert_pipeline_equals_backward, in_one_process, step

BFLOAT16 = {"rtol": 3e-2, "atol": 2e-3}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_a_plain_backward(name: str, schedule: str) -> None:
    assert_pipeline_equals_backward(MODELS[name], MODELS[name].make(), schedule)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.refused is not None])
def test_a_loss_that_microbatches_would_change_is_refused(name: str) -> None:
    entry = MODELS[name]
    pipe = in_one_process(dataclasses.replace(entry, refused=None), entry.make(), "zb-h1")
    with pytest.raises(PipelineError, match=f"{entry.refused}.*Fix: pass loss_fn="):
        step(dataclasses.replace(entry, refused=None), pipe)


def checkpointed(entry: Entry) -> nn.Module:
    model = entry.make()
    if entry.family == "diffusion":
        model.enable_gradient_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return model


CHECKPOINTED = ["llama", "gpt2-tied", "mixtral", "mamba", "t5-tied", "bert", "vit", "whisper", "lora-llama", "dit"]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_under_gradient_checkpointing(name: str) -> None:
    assert_pipeline_equals_backward(MODELS[name], checkpointed(MODELS[name]), "zb-v")


@pytest.mark.parametrize("name", ["llama", "gpt2-tied", "mixtral", "bert", "t5-tied", "vit", "lora-llama", "dit"])
def test_under_bfloat16_autocast(name: str) -> None:
    # Sums of bfloat16 numbers in another order differ, so the plain backward takes the same microbatches where it may.
    even = name in ("bert", "t5-tied", "vit", "dit")
    with torch.autocast("cpu", torch.bfloat16):
        entry = dataclasses.replace(MODELS[name], coupled=even)
        assert_pipeline_equals_backward(entry, entry.make(), "zb-h1", **BFLOAT16)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_hidden_states_of_all_layers(schedule: str) -> None:
    """Hooks that collect them are put on layers in the first forward that asks for them: they were there many times."""

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return sum(state.square().mean() * place for place, state in enumerate(output.hidden_states))

    model, ids = MODELS["llama"].make(), torch.randint(3, 60, (4, 8))
    reference, sample = copy.deepcopy(model), {"input_ids": ids[:2], "output_hidden_states": True}
    options = {"schedule": schedule, "n_microbatches": 2, "ranks": 2, "transport": LocalTransport()}
    pipe = Pipeline(model, loss_fn=loss_fn, sample=sample, **options)
    for _ in range(2):
        loss = pipe.step(input_ids=ids, output_hidden_states=True, target=ids).loss
        expected = loss_fn(reference(input_ids=ids, output_hidden_states=True), ids)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    assert_same_grads(model, reference, rtol=2e-4, atol=2e-6)


def test_a_stage_without_trainable_weights_has_no_backward() -> None:
    def build() -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3])
        return peft.get_peft_model(MODELS["llama"].build(), config)

    entry = dataclasses.replace(MODELS["llama"], name="lora-on-top", build=build)
    pipe = assert_pipeline_equals_backward(entry, entry.make(), "zb-h1")
    after_f, after_i = pipe._plan.profile.bytes_after_F, pipe._plan.profile.bytes_after_I
    assert (after_f[0], after_i[0]) == (0, 0)
    assert after_f[1] > 0


def test_generate_in_one_process() -> None:
    entry = MODELS["llama"]
    model = entry.make()
    pipe = in_one_process(entry, model, "zb-v")
    step(entry, pipe)
    tokens = pipe.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    plain = copy.deepcopy(model).eval().generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, plain)
    assert model.training
    with pytest.raises(PipelineError, match="needs a model of transformers that generates; got VisionTransformer"):
        in_one_process(MODELS["torchvision-vit"], MODELS["torchvision-vit"].make(), "zb-h1").generate()


def test_a_model_that_reads_its_own_values_between_modules_is_refused() -> None:
    class Early(nn.Module):
        """Leaves early when it is sure: as CALM and DeeBERT do."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.max() > 100:
                    return x
            return x

    entry = Entry("early", "own", Early, lambda rows: {"x": torch.randn(rows, 8)}, lambda rows: torch.zeros(rows, 8))
    with pytest.raises(PipelineError, match=r"reads a value that they computed .*if x.max\(\) > 100"):
        in_one_process(entry, entry.make(), "1f1b")
