"""No steady step waits on the host: on a GPU each wait would let it idle. Seen without one, call by call.

``tests/host_waits.py`` notes calls that read a value. In the first two steps there may be some. Afterwards each must
have its reason in ``ALLOWED``. The same steps run on torch's device "meta", whose tensors have no values to read, and
cannot be computed with tensors of the host: so what is made on the host by mistake is found, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gloo import on_ranks
from host_waits import host_waits
from sternway import schedule
from sternway.pipeline import GradScaler, LocalTransport, Pipeline, WithSkips
from sternway.pipeline.build import _assemble
from sternway.pipeline.step import _loss, _runner
from sternway.pipeline.transport import _later

DIM, COUNT, ROWS, STEADY = 8, 4, 12, 2

ALLOWED = {
    ("pipeline/transport/_later.py", "to_host.<locals>.<lambda>"): (
        "on a GPU it waits for one copy, which was begun before, and not for what was begun since"
    ),
    ("pipeline/faults/_trial.py", "Trial.settle"): "the norms of the step before, which are on the host",
    ("pipeline/step/_scaler.py", "GradScaler.step"): "torch's scaler waits to know whether to step",
    ("pipeline/transport/_carrier.py", "GlooCarrier.send"): "NCCL has a carrier of its own",
    ("pipeline/transport/_herald.py", "Herald.announce"): "the facts of a step are on the host, and go over gloo",
}
"""By file and function, why a wait is none on a GPU, or is not ours."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number can be read without a wait: what is done then is what is done on a GPU."""
    as_on_a_gpu(monkeypatch)


@pytest.fixture(params=["cpu", "meta"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors are. On "meta" there is no autocast, and the host learns nothing: it gets zeros."""
    if request.param == "meta":
        monkeypatch.setattr(_assemble, "check_weights", lambda *_: None)
        monkeypatch.setattr(_loss, "check_mean", lambda *_: True)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        for module in (_later, _runner):
            monkeypatch.setattr(module, "to_host", lambda number: lambda: [[0.0]])
    return str(request.param)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_later, "is_here", lambda number: False)


Step = Callable[[int], object]


def assert_no_waits(step: Step, steps: int = STEADY + 3) -> None:
    """Run steps, the first of which may wait."""
    for number in range(STEADY):
        step(number)
    with host_waits() as found:
        for number in range(STEADY, steps):
            step(number)
    waits = {str(wait) for wait in found if wait.is_ours and wait.place not in ALLOWED}
    assert not waits, "\n".join(sorted(waits))


def local(stages: Any, name: str | schedule.Schedule = "zb-h1", device: str = "cpu", **options: Any) -> Pipeline:
    options.setdefault("loss_fn", F.mse_loss)
    named = {} if isinstance(name, schedule.Schedule) else {"n_microbatches": COUNT, "ranks": 2}
    for module in stages.values() if isinstance(stages, dict) else [stages]:
        module.to(device)
    return Pipeline(stages, schedule=name, transport=LocalTransport(device), **named, **options)


def batch(number: int, *shape: int, device: str = "cpu") -> Tensor:
    torch.manual_seed(number)
    return torch.randn(ROWS, *(shape or (DIM,))).to(device)


def plain(name: str) -> dict[int, nn.Module]:
    stages = schedule.make(name, ranks=2, microbatches=COUNT).num_stages
    return {index: gpt(DIM, 1, heads=2) for index in range(stages)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_modules(name: str, device: str) -> None:
    pipe = local(plain(name), name, device)

    def step(number: int) -> None:
        x, target = batch(number, 3, DIM, device=device), batch(number + 10, 3, DIM, device=device)
        pipe.step(x, target=target, record=number % 2 == 0)

    assert_no_waits(step)


def test_auto_after_its_tuning() -> None:
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6)))
    pipe = local(model, "auto", sample=batch(0)[:3], sample_target=batch(0)[:3])
    pipe.step(batch(0), target=batch(1))
    pipe.stop_tuning()
    assert_no_waits(lambda number: pipe.step(batch(number), target=batch(number + 10)))


class Glue(nn.Module):
    """A whole model: blocks, with code between them that subclasses write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.norm = nn.LayerNorm(DIM)


class Skip(Glue):
    """What the first block makes is used after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return self.norm(x) + first


class Tied(Glue):
    """One weight at both ends."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x) @ self.layers[0].weight


class Dead(Glue):
    """A value that is sent on and leads to nothing, and a weight that gets no gradient by it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        aside = self.extra(x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        self.norm(aside + x)
        return x


class Dropped(Glue):
    """Dropout between blocks, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.means = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, mean in zip(self.layers, self.means, strict=True):
            x = self.drop(mean(layer(x)))
        return x


WHOLE = {"1f1b": ["layers.2"], "zb-h1": ["layers.2"], "zb-v": ["layers.1", "layers.2", "layers.3"]}


@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.parametrize("kind", [Skip, Tied, Dead, Dropped])
def test_whole_models(kind: type[nn.Module], name: str, device: str) -> None:
    if kind is Dead and device == "meta":
        pytest.skip("the gradients of dead values are looked at in the first step, and have none")
    pipe = local(kind(), name, device, cuts=WHOLE[name], sample=batch(0, device=device)[:3])
    assert_no_waits(lambda number: pipe.step(batch(number, device=device), target=batch(number + 10, device=device)))


class OwnLoss(Glue):
    """A model that returns its loss, the mean over labels that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, DIM)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x).relu()
        logits = self.norm(x) @ self.table.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_a_models_own_loss() -> None:
    ids = torch.randint(20, (ROWS, 3))
    pipe = local(OwnLoss(), cuts=["layers.2"], loss_fn=None, sample={"ids": ids[:3], "labels": ids[:3]})

    def step(number: int) -> None:
        pipe.step(ids=ids, labels=ids.where(torch.rand(ROWS, 3) < 0.7, -100))

    assert_no_waits(step)


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, summed])
def test_losses_of_labels(loss_fn: Any, device: str) -> None:
    pipe = local(plain("1f1b"), "1f1b", device, loss_fn=lambda output, target: loss_fn(output.mean(1), target))

    def step(number: int) -> None:
        labels = torch.randint(DIM, (ROWS,))
        if loss_fn is summed:
            labels[number] = -100
        x = batch(number, 3, DIM, device=device)
        pipe.step(x, target=labels.to(device), return_outputs=True, loss_everywhere=True)

    assert_no_waits(step)


@pytest.mark.parametrize("how", ["clipped", "on trial", "on trial, and clipped", "accumulated", "scaled"])
def test_optimizer_steps(how: str, device: str) -> None:
    scaler = GradScaler("cpu", init_scale=4.0) if how == "scaled" else None
    if scaler is not None and device == "meta":
        pytest.skip("torch scales on devices with values")
    pipe = local(Dropped(), device=device, cuts=["layers.2"], sample=batch(0, device=device)[:3], scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)

    def step(number: int) -> None:
        pipe.step(batch(number, device=device), target=batch(number + 10, device=device))
        if how.startswith("on trial"):
            pipe.optimizer_step(optimizer, max_norm=1e-3 if "clipped" in how else 1e6)
            return
        if how == "accumulated" and number % 2:
            return
        if scaler is not None:
            scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()

    assert_no_waits(step)


class Ends(nn.Module):
    """A layer with a weight that the other end has, too, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.shared, self.idle = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(1))


class SkipsOut(Ends):
    def forward(self, x: Tensor) -> WithSkips:
        return WithSkips(self.inner(x) * self.shared, {"first": x.detach()})


class SkipsIn(Ends):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return self.inner(x) * self.shared + first


def test_skips_ties_and_recomputed_stages(device: str) -> None:
    plan = replace(schedule.make("1f1b", ranks=3, microbatches=COUNT), recompute=(1,))
    stages = {0: SkipsOut(), 1: gpt(DIM, 1, heads=2), 2: SkipsIn()}
    pipe = local(stages, plan, device, skips={"first": (0, 2)}, tied=[("idle",), ("shared",)])

    def step(number: int) -> None:
        pipe.step(batch(number, 3, DIM, device=device), target=batch(number + 10, 3, DIM, device=device))
        pipe.clip_grad_norm_(1.0)

    assert_no_waits(step)
    assert stages[0].shared.grad is not None
    assert stages[0].idle.grad is None


def two_ranks(rank: int) -> None:
    """Over real processes: stages, optimizer steps on trial, whole models, copies and shards."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        for name in ("1f1b", "zb-h1"):
            stage = nn.Sequential(gpt(DIM, 1, heads=2), nn.Dropout(0.1))
            pipe = Pipeline({rank: stage}, schedule=name, n_microbatches=COUNT, loss_fn=F.mse_loss)
            optimizer = torch.optim.SGD(stage.parameters(), 0.1)

            def step(number: int, pipe: Pipeline = pipe, optimizer: torch.optim.Optimizer = optimizer) -> None:
                pipe.step(batch(number, 3, DIM), target=batch(number + 10, 3, DIM), record=True, loss_everywhere=True)
                pipe.optimizer_step(optimizer, max_norm=1.0)

            assert_no_waits(step)
            pipe.close()
        for kind in (Tied, Dead):
            pipe = Pipeline(
                kind(), schedule="zb-h1", n_microbatches=COUNT, loss_fn=F.mse_loss, cuts=["layers.2"],
                sample=batch(0)[:3],
            )  # fmt: skip

            def accumulate(number: int, pipe: Pipeline = pipe) -> None:
                pipe.step(batch(number), target=batch(number + 10))
                pipe.clip_grad_norm_(1.0)

            assert_no_waits(accumulate)
            pipe.close()
        for name in ("dp", "dp_shard"):  # copies of one stage, and shards of it
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", name))
            model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
            if name == "dp_shard":
                fully_shard(model, mesh=mesh[name])
            pipe = Pipeline({0: model}, schedule="1f1b", n_microbatches=COUNT, loss_fn=F.mse_loss, mesh=mesh)
            optimizer = torch.optim.SGD(pipe.parameters(), 0.1)

            def train(number: int, pipe: Pipeline = pipe, optimizer: torch.optim.Optimizer = optimizer) -> None:
                pipe.step(batch(number), target=batch(number + rank))
                pipe.optimizer_step(optimizer, max_norm=1.0)

            assert_no_waits(train)
            pipe.close()


def test_two_ranks() -> None:
    on_ranks(2, two_ranks)


READ: dict[str, Callable[[Tensor], object]] = {
    "aten::_local_scalar_dense": lambda x: float(x.sum()),
    "aten::equal": lambda x: torch.equal(x, x),
    "aten::nonzero": lambda x: x.nonzero(),
    "aten::masked_select": lambda x: x.masked_select(x > 0),
    "aten::index.Tensor": lambda x: x[x > 0],
    "aten::_unique2": lambda x: x.unique(),
    "Tensor.tolist": lambda x: x.tolist(),
    "Tensor.cpu": lambda x: x.cpu(),
    "aten::_to_copy": lambda x: x.to("meta"),
    "torch.tensor": lambda x: torch.tensor([1.0], device=x.device),
}


@pytest.mark.parametrize("what", list(READ))
def test_what_is_noted(what: str) -> None:
    with host_waits() as found:
        READ[what](torch.ones(3))
    assert [(wait.what, Path(wait.file), wait.is_ours) for wait in found] == [(what, Path(__file__), False)]


def test_what_is_not() -> None:
    x = torch.ones(3)
    with host_waits() as found:
        x[1] = 2.0
        x[x > 1] = 0.0
        torch.where(x > 0, x, 1.0)
        torch.tensor([1.0])  # on the host
        x.double().sum().clamp(min=1)
    assert found == []
    x.tolist()
    assert found == []


def test_waits_of_ours_are_known_by_their_lines() -> None:
    """A search for gradients that are not finite waits, and says so."""
    pipe = local(plain("1f1b"), "1f1b")
    with host_waits() as found:
        pipe.step(batch(0, 3, DIM), target=batch(1, 3, DIM), nonfinite="skip")
    ours = {wait.place for wait in found if wait.is_ours}
    assert ("pipeline/step/_runner.py", "StepRunner._all_finite") in ours
