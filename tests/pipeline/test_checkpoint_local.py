"""Checkpoints of pipelines in one process: every cut, schedule and optimizer; damage; what cannot be saved."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F

from sternway import pipeline
from sternway.demo import GPT
from sternway.errors import CheckpointError
from sternway.pipeline import CheckpointWarning, LocalTransport, Pipeline
from sternway.pipeline.checkpoint import _files as files

VOCABULARY, LENGTH = 11, 6


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, dim=8, heads=2, layers=6, length=LENGTH)
    if tied:
        model.head.weight = model.tokens.weight
    return model


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def pipe_of(model: nn.Module, ranks: int = 2, schedule: str = "1f1b", **options: Any) -> Pipeline:
    return Pipeline(
        model,
        schedule=schedule,
        n_microbatches=4,
        ranks=ranks,
        loss_fn=loss,
        transport=LocalTransport(),
        **options,
    )


def train(
    pipe: Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int, scheduler: Any = None
) -> list[float]:
    """Steps ``first`` to ``last``, each on a batch that its number decides; their losses."""
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        result = pipe.step(tokens, target=tokens, loss_everywhere=True, record=False)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(result.loss))
    return losses


def adamw(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), 1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "sgd with momentum": lambda pipe: torch.optim.SGD(pipe.parameters(), 1e-2, momentum=0.9),
    "plain sgd": lambda pipe: torch.optim.SGD(pipe.parameters(), 1e-2),
    "two groups": lambda pipe: torch.optim.AdamW(
        [
            {"params": [p for _, p in pipe.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in pipe.named_parameters() if p.ndim < 2], "lr": 3e-3, "betas": (0.8, 0.9)},
        ],
        1e-2,
    ),
    "adagrad": lambda pipe: torch.optim.Adagrad(pipe.parameters(), 1e-2),
    "a tensor as rate": lambda pipe: torch.optim.AdamW(pipe.parameters(), torch.tensor(1e-2)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_is_bit_identical(kind: str, tmp_path: Path) -> None:
    whole, first, second = gpt(), gpt(), gpt()
    pipe = pipe_of(whole)
    expected = train(pipe, OPTIMIZERS[kind](pipe), 0, 6)

    pipe = pipe_of(first)
    optimizer = OPTIMIZERS[kind](pipe)
    losses = train(pipe, optimizer, 0, 3)
    pipe.save(tmp_path, optimizer, 3)

    for parameter in second.parameters():
        nn.init.zeros_(parameter)
    pipe = pipe_of(second)
    optimizer = OPTIMIZERS[kind](pipe)
    assert pipe.resume(tmp_path, optimizer).step == 3
    losses += train(pipe, optimizer, 3, 6)
    assert losses == expected
    assert_equal(second.state_dict(), whole.state_dict())


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


SCHEDULES = ("1f1b", "zb-h1", "zb-v")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("by", [(4, "zb-v"), (2, "1f1b"), (1, "zb-h1")])
def test_the_matrix(by: tuple[int, str], tied: bool, tmp_path: Path) -> None:
    """Saved with some ranks and schedule, resumed with every other: the same losses as one that went on by itself."""
    pipe = pipe_of(gpt(tied), *by)
    optimizer = adamw(pipe)
    train(pipe, optimizer, 0, 2)
    pipe.save(tmp_path, optimizer, 2)
    expected = train(pipe, optimizer, 2, 4)
    for ranks in (4, 2, 1):
        for schedule in SCHEDULES:
            other = pipe_of(gpt(tied), ranks, schedule)
            theirs = adamw(other)
            assert other.resume(tmp_path, theirs).step == 2
            losses = train(other, theirs, 2, 4)
            if (ranks, schedule) == by:
                assert losses == expected
            assert losses == pytest.approx(expected, rel=1e-4), (ranks, schedule)


def test_accumulated_gradients_and_dropout(tmp_path: Path) -> None:
    """Random numbers went on from the number of optimizer steps, though each had several calls of step."""

    def run(pipe: Pipeline, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(pipe.parameters(), 1e-2)
        for step in range(first, last):
            for _ in range(2):
                pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4), record=False)
            optimizer.step(), optimizer.zero_grad()
            if step == 1:
                pipe.save(tmp_path, optimizer, step + 1)

    def make() -> Pipeline:
        torch.manual_seed(0)
        stages = {i: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for i in range(2)}
        mse = nn.functional.mse_loss
        return Pipeline(
            stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=mse, transport=LocalTransport()
        )  # fmt: skip

    whole, resumed = make(), make()
    run(whole, 0, 4)
    found = resumed.resume(tmp_path)
    assert found is not None
    assert found.step == 2
    run(resumed, found.step, 4)
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_scheduler_generators_and_data(tmp_path: Path) -> None:
    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)
    train(pipe, optimizer, 0, 3, scheduler)
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    pipe.save(tmp_path, optimizer, 3, scheduler=scheduler, data={"epoch": 2, "order": torch.arange(3), "at": (1, "x")})
    drawn = random.random(), numpy.random.rand(), float(torch.rand(()))
    expected = train(pipe, optimizer, 3, 6, scheduler)
    rate = scheduler.get_last_lr()

    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)
    found = pipe.resume(tmp_path, optimizer, scheduler=scheduler)
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == drawn
    assert found.data["epoch"] == 2
    assert found.data["order"].tolist() == [0, 1, 2]
    assert found.data["at"] == (1, "x")
    assert train(pipe, optimizer, 3, 6, scheduler) == expected
    assert scheduler.get_last_lr() == rate


def test_buffers_and_stages_given_apart(tmp_path: Path) -> None:
    """Stages with the same names inside are kept apart by their index; batch norm's averages are kept at all."""

    def stages() -> dict[int, nn.Module]:
        return {i: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for i in range(2)}

    def pipe_with(modules: dict[int, nn.Module]) -> Pipeline:
        options: dict[str, Any] = {"schedule": "1f1b", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
        return Pipeline(modules, transport=LocalTransport(), **options)

    mine, other = stages(), stages()
    pipe = pipe_with(mine)
    pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    pipe.save(tmp_path)
    assert pipe_with(other).resume(tmp_path).step == 0
    for index, module in mine.items():
        assert_equal(module.state_dict(), other[index].state_dict())
    loaded = nn.Sequential(*(stages().values()))
    dcp_to_torch_save(tmp_path / "step-00000000", tmp_path / "whole.pt")
    loaded.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["model"])
    assert_equal(loaded.state_dict(), nn.Sequential(*mine.values()).state_dict())


def test_one_process_without_the_library(tmp_path: Path) -> None:
    """The lines of docs/survive.md: torch's own converter, and a plain model and optimizer go on from there."""
    pipe = pipe_of(gpt(tied=True), 4, "zb-v")
    optimizer = adamw(pipe)
    train(pipe, optimizer, 0, 3)
    path = pipe.save(tmp_path, optimizer, 3, data={"batch": 3}).wait()
    expected = train(pipe, optimizer, 3, 6)

    dcp_to_torch_save(path, tmp_path / "whole.pt")
    saved, run = (torch.load(file, weights_only=True) for file in (tmp_path / "whole.pt", path / "run.pt"))
    model = GPT(vocabulary=VOCABULARY, dim=8, heads=2, layers=6, length=LENGTH)
    model.head.weight = model.tokens.weight
    model.load_state_dict(saved["model"])
    plain = torch.optim.AdamW(model.parameters(), run["options"]["norm.weight"]["lr"])
    for name, parameter in model.named_parameters():
        plain.state[parameter] = saved["optimizer"]["state"][name]
    losses = []
    for step in range(run["data"]["batch"], 6):
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        value = loss(model(tokens), tokens)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        losses.append(float(value.detach()))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_the_newest_whole_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    assert pipe.resume(tmp_path / "nowhere", optimizer) is None
    for step in range(5):
        pipe.save(tmp_path, optimizer, step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "step-00000009.tmp").mkdir()  # one that was being written when its run died
    assert pipe.resume(tmp_path, optimizer).step == 4
    assert pipe.resume(tmp_path, optimizer, step=2).step == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 1 in"):
        pipe.resume(tmp_path, optimizer, step=1)
    pipe.save(tmp_path, optimizer, 3)  # after going back: what was ahead is another future
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004.old"]
    assert pipe.resume(tmp_path, optimizer).step == 3


def test_a_kill_between_any_two_changes_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop after each rename and removal in turn: a whole checkpoint is always there."""
    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    pipe.save(tmp_path, optimizer, 1)
    pipe.save(tmp_path, optimizer, 2)

    class Killed(BaseException):
        pass

    for last in range(6):
        calls = [0]

        def counted(real: Any, calls: list[int] = calls, last: int = last) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                if calls[0] == last:
                    raise Killed
                calls[0] += 1
                return real(*arguments, **options)

            return call

        folder = files.begin(tmp_path, 2)
        for path in (tmp_path / "step-00000002").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        manifest = files.read_manifest(tmp_path / "step-00000002")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", counted(Path.rename))
            patch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))
            with suppress(Killed):
                files.commit(folder, manifest, keep=1)
        assert pipe.resume(tmp_path, optimizer).step in (1, 2)
        pipe.save(tmp_path, optimizer, 1)
        pipe.save(tmp_path, optimizer, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints; a test that damages them takes a copy."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    train(pipe, optimizer, 0, 1)
    for step in (1, 2):
        pipe.save(folder, optimizer, step)
    return folder


class TestDamage:
    @pytest.fixture
    def pipe(self, saved: Path, tmp_path: Path) -> Pipeline:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        return pipe_of(gpt())

    @pytest.mark.parametrize("name", ["manifest.json", "run.pt", ".metadata", "__0_0.distcp"])
    @pytest.mark.parametrize("damage", ["gone", "shorter", "changed", "empty"])
    def test_the_one_before_is_used(self, pipe: Pipeline, tmp_path: Path, name: str, damage: str) -> None:
        path = tmp_path / "step-00000002" / name
        content = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        elif damage == "shorter":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "changed":
            content[len(content) // 2] ^= 255
            path.write_bytes(content)
        else:
            path.write_bytes(b"")
        with pytest.warns(CheckpointWarning, match=r"step-00000002 is skipped: .*Fix: remove that checkpoint"):
            assert pipe.resume(tmp_path, adamw(pipe)).step == 1
        with pytest.raises(CheckpointError, match="Fix: remove that checkpoint"):
            pipe.resume(tmp_path, step=2)

    def test_none_is_whole(self, pipe: Pipeline, tmp_path: Path) -> None:
        for step in (1, 2):
            (tmp_path / f"step-0000000{step}" / "run.pt").unlink()
        with (
            pytest.warns(CheckpointWarning, match="step-00000002 is skipped"),
            pytest.raises(
                CheckpointError,
                match=r"no intact checkpoint in .*; got step-00000002: .*; step-00000001: step-00000001 lacks",
            ),
        ):
            pipe.resume(tmp_path)

    def _forge(self, folder: Path, name: str, content: bytes) -> None:
        """Replace a file, and make the manifest agree with it."""
        (folder / name).write_bytes(content)
        manifest = json.loads((folder / "manifest.json").read_text())
        found = files.digest(folder / name)
        manifest["files"][name] = {"bytes": found.bytes, "sha256": found.sha256}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    @pytest.mark.parametrize("name", ["run.pt", ".metadata"])
    def test_code_is_not_run(self, pipe: Pipeline, tmp_path: Path, name: str) -> None:
        """Even with a manifest to match: a pickle that calls something is refused."""

        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "ran",)

        self._forge(tmp_path / "step-00000002", name, pickle.dumps(Evil()))
        with pytest.warns(CheckpointWarning, match="is skipped"):
            assert pipe.resume(tmp_path, adamw(pipe)).step == 1
        assert not (tmp_path / "ran").exists()

    def test_a_tensor_from_elsewhere(self, pipe: Pipeline, tmp_path: Path) -> None:
        folder = tmp_path / "step-00000002"
        content = (folder / ".metadata").read_bytes()
        self._forge(folder, ".metadata", content.replace(b"__0_0.distcp", b"../0.distcpx"))
        with pytest.raises(CheckpointError, match=r"describes tensors.*'\.\./0\.distcpx'|got .*\.\./0\.distcpx"):
            pipe.resume(tmp_path, step=2)

    def test_an_entry_that_is_no_tensor(self, pipe: Pipeline, tmp_path: Path) -> None:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        folder = tmp_path / "step-00000002"
        description = pickle.loads((folder / ".metadata").read_bytes())
        description.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
        self._forge(folder, ".metadata", pickle.dumps(description))
        with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
            pipe.resume(tmp_path, step=2)

    def test_another_model(self, pipe: Pipeline, tmp_path: Path) -> None:
        wider = pipe_of(GPT(vocabulary=VOCABULARY, dim=16, heads=2, layers=6, length=LENGTH))
        with pytest.raises(CheckpointError, match=r"must have the shape that it was saved with, \(11, 8\)"):
            wider.resume(tmp_path, step=2)
        deeper = pipe_of(GPT(vocabulary=VOCABULARY, dim=8, heads=2, layers=7, length=LENGTH))
        with pytest.raises(CheckpointError, match=r"got none for model\.blocks\.6\.norm1\.weight"):
            deeper.resume(tmp_path, step=2)

    def test_without_the_optimizer(self, pipe: Pipeline, tmp_path: Path) -> None:
        pipe.save(tmp_path, None, 3)
        assert pipe.resume(tmp_path).step == 3
        with pytest.raises(CheckpointError, match=r"got none for tokens\.weight"):
            pipe.resume(tmp_path, adamw(pipe), step=3)


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"directory": 3}, "got the folder 3"),
            ({"directory": ""}, "got the folder ''"),
            ({"step": -1}, "got the step -1"),
            ({"step": 1.5}, "got the step 1.5"),
            ({"step": True}, "got the step True"),
            ({"optimizer": "adam"}, "got the optimizer 'adam'"),
            ({"scheduler": 1}, "got the scheduler 1"),
            ({"keep": 0}, "got keep=0"),
            ({"data": object()}, "only numbers, text, tensors and containers of them can be saved .*; got "),
            ({"data": lambda: 1}, "only numbers, text, tensors and containers of them can be saved .*; got "),
        ],
    )
    def test_in_save(self, options: dict[str, Any], message: str, tmp_path: Path) -> None:
        pipe = pipe_of(gpt())
        arguments = {"directory": tmp_path, "step": 0} | options
        with pytest.raises(CheckpointError, match=message):
            pipe.save(**arguments)
        assert not files.candidates(tmp_path)
        pipe.save(tmp_path)  # nothing was spoiled

    def test_an_optimizer_of_other_parameters(self, tmp_path: Path) -> None:
        pipe = pipe_of(gpt())
        with pytest.raises(CheckpointError, match=r"parameters of the pipeline only; got another one, of shape \(3,\)"):
            pipe.save(tmp_path, torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1))

        pipe.save(tmp_path, torch.optim.SGD(pipe.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"parameters of the pipeline only; got another one, of shape \(3,\)"):
            pipe.resume(tmp_path, torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1))

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        pipe = pipe_of(gpt())
        with pytest.raises(CheckpointError, match=r"cannot be written to; got .*Not a directory"):
            pipe.save(tmp_path / "file")
        with pytest.raises(CheckpointError, match=r"cannot be read; got .*Not a directory"):
            pipe.resume(tmp_path / "file")


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    pipe = pipe_of(gpt())
    optimizer = adamw(pipe)
    train(pipe, optimizer, 0, 2)
    expected = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    saving = pipe.save(tmp_path, optimizer, 2, wait=False)
    train(pipe, optimizer, 2, 4)
    assert saving.wait() == tmp_path / "step-00000002"
    assert saving.done
    assert saving.stall_seconds > 0
    pipe.resume(tmp_path, optimizer)
    assert_equal(pipe.state_dict(), expected)


def test_a_save_in_the_background_that_fails_says_so_at_the_next(tmp_path: Path) -> None:
    pipe = pipe_of(gpt())
    (tmp_path / "file").write_text("")
    saving = pipe.save(tmp_path / "file", wait=False)
    with pytest.raises(CheckpointError, match="Not a directory"):
        saving.wait()
    with pytest.raises(CheckpointError, match="Not a directory"):
        pipe.save(tmp_path)
    assert pipe.save(tmp_path).wait().name == "step-00000000"


def test_the_surface_says_what_was_resumed(tmp_path: Path) -> None:
    pipe = pipe_of(gpt())
    path = pipe.save(tmp_path, None, 7, data="here").wait()
    assert pipe.resume(tmp_path) == pipeline.Resumed(7, "here", path)
    assert files.read_manifest(path).made_with["schedule"] == "1f1b"
