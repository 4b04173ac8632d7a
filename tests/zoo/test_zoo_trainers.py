"""``sternway.saved`` under other people's training loops: one line, and the same weights to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn

from sternway import saved
from zoo.models import MODELS


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """A process has one state of accelerate, and a Trainer leaves it behind."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def rows(count: int = 12) -> list[dict[str, Any]]:
    batch, _ = MODELS["llama"].data(count)
    return [{name: value[row] for name, value in batch.items()} for row in range(count)]


def attached(model: nn.Module, folder: Path) -> saved.Attached:
    return saved.offload(to="disk", directory=folder, min_bytes=0).attach(model)


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    changed = False
    start = MODELS["llama"].make()
    pairs = zip(model.named_parameters(), reference.parameters(), start.parameters(), strict=True)
    for (name, ours), theirs, before in pairs:
        assert torch.equal(ours, theirs), name
        changed |= not torch.equal(ours, before)
    assert changed


def test_trainer(tmp_path: Path) -> None:
    def train(policy: bool) -> nn.Module:
        model = MODELS["llama"].make()
        handle = attached(model, tmp_path) if policy else None
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=rows()).train()
        assert handle is None or (handle.report is not None and handle.report.moved_bytes > 0)
        return model

    assert_same_weights(train(True), train(False))


def test_accelerate(tmp_path: Path) -> None:
    def train(policy: bool) -> nn.Module:
        model = MODELS["llama"].make()
        handle = attached(model, tmp_path) if policy else None
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        loader = torch.utils.data.DataLoader(rows(), batch_size=4)
        ready, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        for batch in data:
            accelerator.backward(ready(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert handle is None or (handle.report is not None and handle.report.moved_bytes > 0)
        return model

    assert_same_weights(train(True), train(False))


def test_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{str(number): number for number in range(2, 64)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )

    def train(policy: bool) -> nn.Module:
        model = MODELS["llama"].make()
        handle = attached(model, tmp_path) if policy else None
        config = trl.SFTConfig(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, report_to="none", save_strategy="no",
            use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False, logging_strategy="no",
        )  # fmt: skip
        data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
        trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer).train()
        assert handle is None or (handle.report is not None and handle.report.moved_bytes > 0)
        return model

    assert_same_weights(train(True), train(False))
