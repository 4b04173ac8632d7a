"""Batches as keyword arguments and the model's own loss: uneven labels give the gradient of the whole batch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

WORDS, DIM, LENGTH = 13, 8, 6


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Output2(OrderedDict):
    """As transformers' ModelOutput: items that are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.drop(self.layer(x)).tanh()
        return x + (h if mask is None else h * mask)


class LanguageModel(nn.Module):
    """Tied embeddings, blocks, and a loss of one of several kinds."""

    def __init__(self, kind: str = "shifted", container: type = Output) -> None:
        super().__init__()
        self.kind, self.container = kind, container
        self.tokens = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        mask = None if attention_mask is None else attention_mask[..., None].to(self.tokens.weight.dtype)
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, mask=mask)
        logits = self.head(x)
        loss = None if labels is None else self.loss(logits, labels)
        return self.container(loss=loss, logits=logits)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "classes":
            return F.cross_entropy(logits.mean(1), labels)
        if self.kind == "distance":
            return F.mse_loss(logits.mean(1), labels)
        if self.kind == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.kind == "odd":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).sqrt()
        if self.kind == "wrapped":  # the last label of each row, as models of the MBart family look for
            labels.gather(1, (labels != -100).sum(1, keepdim=True) - 1)
        reduction = "sum" if self.kind == "sum" else "mean"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        if self.kind == "decay":
            loss = loss + 0.1 * self.head.weight.square().sum()
        if self.kind == "term":  # as one that balances experts
            loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
        return loss


def batch_of(rows: int, kind: str = "shifted") -> dict[str, Tensor]:
    torch.manual_seed(4)
    ids = torch.randint(0, WORDS, (rows, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (rows, 1))).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1] = -100
    if kind == "classes":
        labels = torch.randint(0, WORDS, (rows,))
        labels[1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build(model: nn.Module, microbatches: int = 3, **options: Any) -> Pipeline:
    options = {"schedule": "zb-h1", "ranks": 2, "transport": LocalTransport()} | options
    return Pipeline(model, n_microbatches=microbatches, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("container", [Output, Output2])
@pytest.mark.parametrize("kind", ["shifted", "tokens", "sum", "classes", "decay"])
def test_equals_the_loss_of_the_whole_batch(kind: str, container: type, schedule: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(kind, container)
    reference, batch = copy.deepcopy(model), batch_of(7, kind)
    pipe = build(model, schedule=schedule, sample={name: value[:2] for name, value in batch.items()})
    for _ in range(2):
        result = pipe.step(**batch)
        expected = reference(**batch).loss
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach())
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)
    result = pipe.evaluate(**batch)
    torch.testing.assert_close(result.loss, reference(**batch).loss.detach())
    assert type(result.outputs) is container
    torch.testing.assert_close(result.outputs.loss, result.loss)
    torch.testing.assert_close(result.outputs.logits, reference(**batch).logits.detach())
    batch.pop("labels"), batch.pop("attention_mask")
    assert pipe.evaluate(**batch).loss is None


def test_a_microbatch_without_any_label() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    reference, batch = copy.deepcopy(model), batch_of(6)
    batch["labels"][2:4] = -100
    pipe = build(model)
    result = pipe.step(**batch)
    expected = reference(**batch).loss
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach())
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_head_that_begins_with_zeros() -> None:
    """Then all labels have the same loss, and only which of them count can tell how it averages."""
    torch.manual_seed(0)
    model = LanguageModel()
    with torch.no_grad():
        model.tokens.weight.zero_()
    model.head.weight = nn.Parameter(torch.zeros(WORDS, DIM))
    with torch.no_grad():
        model.tokens.weight.normal_()
    reference, batch = copy.deepcopy(model), batch_of(6)
    build(model).step(**batch)
    reference(**batch).loss.backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_head_on_frozen_layers() -> None:
    """Nothing that the last stage receives needs a gradient."""
    torch.manual_seed(0)
    model = LanguageModel()
    model.head.weight = nn.Parameter(torch.randn(WORDS, DIM))
    model.tokens.requires_grad_(False), model.blocks.requires_grad_(False)
    reference, batch = copy.deepcopy(model), batch_of(6)
    build(model).step(**batch)
    reference(**batch).loss.backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        ("distance", torch.zeros(6, WORDS), "needs labels= of integers.* Fix: pass loss_fn="),
        ("odd", None, "own loss must be a mean over the labels.*got another loss"),
        ("term", None, "own loss has a term that does not follow labels=.*got a gradient of rows that have no labels"),
        ("tokens", torch.full((6, LENGTH), -100), "not seen from so few labels"),
        ("wrapped", torch.ones(6, LENGTH).long(), "must take rows without labels.*got RuntimeError: index -1"),
    ],
)
def test_losses_that_are_refused(kind: str, labels: Tensor | None, message: str) -> None:
    batch = batch_of(6)
    if labels is not None:
        batch["labels"] = labels
    with pytest.raises(PipelineError, match=message):
        build(LanguageModel(kind)).step(**batch)


def test_training_without_any_loss() -> None:
    batch = batch_of(6)
    batch.pop("labels")
    with pytest.raises(PipelineError, match=r"needs labels= of integers"):
        build(LanguageModel()).step(**batch)


def test_one_microbatch_may_have_any_loss() -> None:
    model = LanguageModel("distance")
    reference, batch = copy.deepcopy(model), batch_of(4)
    batch["labels"] = torch.randn(4, WORDS)
    build(model, microbatches=1).step(**batch)
    reference(**batch).loss.backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def summed(output: Output, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_function_that_returns_sum_and_count(schedule: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    reference, batch = copy.deepcopy(model), batch_of(7)
    target = batch.pop("labels")
    pipe = build(model, loss_fn=summed, schedule=schedule)
    for _ in range(2):
        result = pipe.step(**batch, target=target)
        expected = F.cross_entropy(reference(**batch).logits.flatten(0, 1), target.flatten())
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach())
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_mean_over_uneven_targets_is_refused() -> None:
    batch = batch_of(6)
    target = batch.pop("labels")
    pipe = build(LanguageModel(), loss_fn=lambda o, t: F.cross_entropy(o.logits.flatten(0, 1), t.flatten()))
    with pytest.raises(PipelineError, match=r"not spread evenly.*Fix: return \(sum, count\)"):
        pipe.step(**batch, target=target)


def test_a_count_that_depends_on_the_output_is_refused() -> None:
    batch = batch_of(6)
    target = batch.pop("labels")
    pipe = build(LanguageModel(), loss_fn=lambda o, t: (o.logits.sum(), o.logits.sum()))
    with pytest.raises(PipelineError, match="must depend on the target alone"):
        pipe.step(**batch, target=target)


def _two_ranks(rank: int) -> None:
    torch.manual_seed(0)
    model, reference = LanguageModel(), LanguageModel()
    reference.load_state_dict(model.state_dict())
    reference.head.weight = reference.tokens.weight
    batch = batch_of(6)
    sample = {name: value[:2] for name, value in batch.items()} if rank == 0 else None
    ways: list[tuple[str, dict[str, Any]]] = [
        ("zb-h1", {"sample": sample, "cuts": ["blocks.1"]}),
        ("1f1b", {"cuts": ["blocks.1"]}),
        ("zb-v", {"sample": sample, "cuts": ["blocks.0", "blocks.1", "blocks.2"]}),
    ]
    for schedule, options in ways:
        mine = copy.deepcopy(model)
        pipe = Pipeline(mine, schedule=schedule, n_microbatches=3, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        theirs = copy.deepcopy(reference)
        plain = torch.optim.SGD(theirs.parameters(), 0.1)
        for step in range(3):
            inputs = batch if rank == 0 else {}  # the others get from the first stage what they need
            if step == 1:
                inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
            result = pipe.step(**inputs, loss_everywhere=True)
            whole = {name: value for name, value in batch.items() if step != 1 or name != "attention_mask"}
            expected = theirs(**whole).loss
            expected.backward()
            torch.testing.assert_close(result.loss, expected.detach())
            names = dict(theirs.named_parameters(remove_duplicate=False))
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, names[name].grad, rtol=1e-4, atol=1e-6)
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        elsewhere = [name for name, p in mine.named_parameters() if p.is_meta]
        assert elsewhere, "what other ranks hold was kept"
        pipe.eval()
        assert pipe.evaluate(**(batch if rank == 0 else {}), loss_everywhere=True).loss is not None
        pipe.close()


def test_two_processes() -> None:
    on_ranks(2, _two_ranks)
