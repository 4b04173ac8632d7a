"""All ranks in one process: every schedule gives one process's gradients, whatever travels between the stages."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads
from sternway import pipeline, schedule
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline import LocalTransport, Pipeline, Presplit
from sternway.pipeline.build import _measure

DIM = 8


def stages_of(count: int) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    return {index: gpt(DIM, 1, heads=2) for index in range(count)}


def whole(stages: dict[int, nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(stages[index] for index in sorted(stages)))


def assert_step_equals_one_process(
    plan: schedule.Schedule, rows: int, stages: dict[int, nn.Module] | None = None
) -> None:
    stages = stages or stages_of(plan.num_stages)
    reference = copy.deepcopy(whole(stages))
    x, target = torch.randn(rows, 4, DIM), torch.randn(rows, 4, DIM)
    pipe = Pipeline(stages, schedule=plan, loss_fn=F.mse_loss, transport=LocalTransport())
    result = pipe.step(x, target=target)
    loss = F.mse_loss(reference(x), target)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_same_grads(whole(stages), reference, rtol=1e-4, atol=1e-6)
    assert [[event.action for event in rank] for rank in result.timeline.events] == [list(r) for r in plan.actions]


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", schedule.names())
def test_every_schedule_equals_one_process(name: str, ranks: int, microbatches: int) -> None:
    try:
        plan = schedule.make(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        pytest.skip("this schedule cannot be made for these numbers")
    assert_step_equals_one_process(plan, rows=2 * microbatches)


@pytest.mark.parametrize("name", ["dualpipe-v", "zb-v", "zb-h2", "interleaved-1f1b"])
def test_eight_ranks(name: str) -> None:
    assert_step_equals_one_process(schedule.make(name, ranks=8, microbatches=16), rows=16)


def test_a_searched_schedule() -> None:
    costs = schedule.Costs(F=1, I=1.2, W=0.7, comm=0.1)
    assert_step_equals_one_process(schedule.search(costs, ranks=3, microbatches=6, memory_limit=4), rows=12)


def test_the_last_microbatch_may_be_smaller() -> None:
    assert_step_equals_one_process(schedule.make("zb-h1", ranks=2, microbatches=4), rows=7)


@pytest.mark.parametrize("device", [2, "cda"])
def test_a_device_that_torch_does_not_have(device: object) -> None:
    with pytest.raises(PipelineError, match=re.escape(f"that torch has here; got {device!r}. Fix: pass")):
        LocalTransport(device)  # type: ignore[arg-type]


def test_bit_identical_to_one_process_microbatch_by_microbatch() -> None:
    """With whole backwards in the order of the microbatches, the sums are the same sums."""
    stages = stages_of(2)
    reference = copy.deepcopy(whole(stages))
    x, target = torch.randn(6, 4, DIM), torch.randn(6, 4, DIM)
    Pipeline(
        stages, schedule=schedule.make("1f1b", ranks=2, microbatches=3), loss_fn=F.mse_loss, transport=LocalTransport()
    ).step(x, target=target)
    for part, goal in zip(x.chunk(3), target.chunk(3), strict=True):
        (F.mse_loss(reference(part), goal) * (2 / 6)).backward()
    assert_same_grads(whole(stages), reference, rtol=0, atol=0)


@dataclass
class Parcel:
    x: Tensor
    extra: dict[str, Any]


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Parcel:
        h = self.layer(x) * scale
        return Parcel(h, {"mask": x > 0, "pair": (h.sin(), 3), "note": "text", "same": x.detach()})


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, parcel: Parcel) -> tuple[Tensor, Parcel]:
        assert parcel.extra["note"] == "text"
        assert not parcel.extra["mask"].requires_grad
        sine, three = parcel.extra["pair"]
        return self.layer(parcel.x.masked_fill(parcel.extra["mask"], 0.0)) * three, Parcel(sine, {})


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, parcel: Parcel) -> Tensor:
        return self.layer(x) + parcel.x


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_any_tree_travels(name: str) -> None:
    torch.manual_seed(0)
    stages = {0: First(), 1: Second(), 2: Third()}
    reference = copy.deepcopy(nn.ModuleList(stages.values()))
    x, target = torch.randn(6, DIM), torch.randn(6, DIM)
    pipe = Pipeline(stages, schedule=name, n_microbatches=3, ranks=3, loss_fn=F.mse_loss, transport=LocalTransport())
    pipe.step(x, target=target, scale=2.0)
    F.mse_loss(reference[2](*reference[1](reference[0](x, scale=2.0))), target).backward()
    assert_same_grads(nn.ModuleList(stages.values()), reference, rtol=1e-4, atol=1e-6)


class SkipFrom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return pipeline.WithSkips(h.tanh(), {"early": h})


class SkipTo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, early: Tensor) -> Tensor:
        return self.layer(x) * early


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_tensors_that_pass_stages_by(name: str) -> None:
    torch.manual_seed(0)
    stages = {0: SkipFrom(), 1: nn.Linear(DIM, DIM), 2: SkipTo()}
    reference = copy.deepcopy(nn.ModuleList(stages.values()))
    x, target = torch.randn(6, DIM), torch.randn(6, DIM)
    pipe = Pipeline(
        stages,
        schedule=name,
        n_microbatches=3,
        ranks=3,
        loss_fn=F.mse_loss,
        skips={"early": (0, 2)},
        transport=LocalTransport(),
    )
    pipe.step(x, target=target)
    first = reference[0](x)
    F.mse_loss(reference[2](reference[1](first.output), early=first.skips["early"]), target).backward()
    assert_same_grads(nn.ModuleList(stages.values()), reference, rtol=1e-4, atol=1e-6)


def test_tied_parameters_on_two_ranks() -> None:
    torch.manual_seed(0)
    stages = {0: nn.Embedding(11, DIM), 1: nn.Linear(DIM, 11, bias=False)}
    tied = nn.Linear(DIM, 11, bias=False)
    pipe = Pipeline(
        stages,
        schedule="zb-h1",
        n_microbatches=2,
        ranks=2,
        loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        tied=[("weight",)],
        transport=LocalTransport(),
    )
    torch.testing.assert_close(stages[0].weight, stages[1].weight)
    with torch.no_grad():
        tied.weight.copy_(stages[0].weight)
    tokens = torch.randint(0, 11, (4, 5))
    for _ in range(3):  # gradients add up over steps, and earlier ones are summed already
        pipe.step(tokens, target=tokens)
        F.cross_entropy(tied(F.embedding(tokens, tied.weight)).flatten(0, 1), tokens.flatten()).backward()
        for stage in stages.values():
            torch.testing.assert_close(stage.weight.grad, tied.weight.grad)
    assert float(pipe.clip_grad_norm_(100.0)) == pytest.approx(float(tied.weight.grad.norm()), rel=1e-5)


def test_checkpointing_inside_a_stage() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = gpt(DIM, 1, heads=2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {index: Checkpointed() for index in range(2)}
    assert_step_equals_one_process(schedule.make("zb-h1", ranks=2, microbatches=4), rows=8, stages=stages)


def test_autocast() -> None:
    stages = stages_of(2)
    reference = copy.deepcopy(whole(stages))
    x, target = torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
    pipe = Pipeline(stages, schedule="zb-h1", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target=target)
        loss = F.mse_loss(reference(x), target)
    loss.backward()
    assert_same_grads(whole(stages), reference, rtol=5e-2, atol=5e-3)


def test_what_autocast_leaves_in_float32_stays_so_in_w() -> None:
    """I and B run without autocast, as a backward should; W ran under it, and rounded its products to bfloat16."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(x.float() @ self.weight)

    stages: dict[int, nn.Module] = {0: Island(), 1: Island()}
    reference = copy.deepcopy(whole(stages))
    x, target = torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
    pipe = Pipeline(stages, schedule="zb-h1", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target=target)
    F.mse_loss(reference(x), target).backward()
    assert_same_grads(whole(stages), reference)


def test_a_derived_weight_under_a_checkpoint_and_autocast() -> None:
    """What I recomputes under autocast, W reads without it."""

    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(DIM, 4)), nn.Parameter(torch.randn(4, DIM))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: torch.tanh(x @ (self.a @ self.b).tanh()), x, use_reentrant=False)

    stages: dict[int, nn.Module] = {0: Derived(), 1: Derived()}
    reference = copy.deepcopy(whole(stages))
    x, target = torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
    pipe = Pipeline(stages, schedule="zb-h1", n_microbatches=1, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target=target)
        loss = F.mse_loss(reference(x), target)
    loss.backward()
    assert_same_grads(whole(stages), reference, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("on_trial", [False, True])
def test_gradients_of_float64_are_clipped_by_a_norm_of_float64(on_trial: bool) -> None:
    stages = {index: stage.double() for index, stage in stages_of(2).items()}
    reference = copy.deepcopy(whole(stages))
    pipe = Pipeline(stages, schedule="zb-h1", n_microbatches=4, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    mine, theirs = torch.optim.SGD(pipe.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    x, target = torch.randn(2, 4, 4, DIM, dtype=torch.float64)
    pipe.step(x, target=target)
    F.mse_loss(reference(x), target).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    theirs.step()
    if on_trial:
        pipe.optimizer_step(mine, max_norm=0.01)
        pipe.settle()
    else:
        torch.testing.assert_close(pipe.clip_grad_norm_(0.01), expected, rtol=1e-12, atol=0)
        mine.step()
    for ours, other in zip(pipe.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-14)


def test_fifty_steps_of_adamw_with_clipping() -> None:
    stages = stages_of(4)
    reference = copy.deepcopy(whole(stages))
    pipe = Pipeline(stages, schedule="zb-v", n_microbatches=4, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    mine, theirs = torch.optim.AdamW(pipe.parameters(), 1e-3), torch.optim.AdamW(reference.parameters(), 1e-3)
    for _ in range(50):
        x, target = torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
        result = pipe.step(x, target=target)
        norm = pipe.clip_grad_norm_(0.5)
        mine.step()
        mine.zero_grad()
        loss = F.mse_loss(reference(x), target)
        loss.backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(norm, expected, rtol=1e-3, atol=1e-4)
    for ours, other in zip(pipe.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-3)


def test_evaluate_and_outputs() -> None:
    stages = stages_of(2)
    pipe = Pipeline(stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    x, target = torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
    result = pipe.evaluate(x, target=target)
    expected = whole(stages)(x)
    torch.testing.assert_close(result.outputs, expected.detach())
    torch.testing.assert_close(result.loss, F.mse_loss(expected, target).detach())
    assert "outputs   of the batch" in repr(result)
    assert all(p.grad is None for p in pipe.parameters())
    assert not result.outputs.requires_grad
    torch.testing.assert_close(pipe.evaluate(x, join=False).outputs, list(expected.detach().chunk(2)))
    trained = pipe.step(x, target=target, return_outputs=True)
    torch.testing.assert_close(torch.cat(trained.outputs), expected)


def test_a_stage_that_begins_in_place_is_told_what_to_do() -> None:
    class OnView(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, :4].mul_(2)
            return x

    x = torch.randn(4, DIM)
    for second in (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM)), OnView()):
        stages = {0: nn.Linear(DIM, DIM), 1: second}
        pipe = Pipeline(
            stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=lambda y, _: y.mean(),
            transport=LocalTransport(),
        )  # fmt: skip
        with pytest.raises(PipelineError, match=r"stage 1 changes in place what it received.*Fix: change a copy"):
            pipe.step(x, target=x)


def test_values_for_every_stage_and_ready_microbatches() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    torch.manual_seed(0)
    stages = {0: Scaled(), 1: Scaled()}
    reference = copy.deepcopy(nn.ModuleList(stages.values()))
    x, target, scale = torch.randn(4, DIM), torch.randn(4, DIM), torch.randn(4, 1)
    pipe = Pipeline(
        stages,
        schedule="zb-h1",
        n_microbatches=2,
        ranks=2,
        loss_fn=F.mse_loss,
        transport=LocalTransport(),
    )
    pipe.step(x, target=target, stage_kwargs={"scale": scale})
    expected = F.mse_loss(reference[1](reference[0](x, scale=scale), scale=scale), target)
    expected.backward(retain_graph=True)
    assert_same_grads(nn.ModuleList(stages.values()), reference, rtol=1e-4, atol=1e-6)
    ready = Pipeline(
        stages, schedule="1f1b", n_microbatches=3, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport(),
        chunk=Presplit(),
    )  # fmt: skip
    x, target, scale = ([each[:1], each[1:2], each[2:]] for each in (x, target, scale))
    result = ready.step(x, target=target, stage_kwargs={"scale": scale})
    torch.testing.assert_close(result.loss, expected.detach())
    expected.backward()
    assert_same_grads(nn.ModuleList(stages.values()), reference, rtol=1e-4, atol=1e-6)
    with pytest.raises(PipelineError, match=r"must be a sequence of 3 with Presplit.*got 2 entries"):
        ready.step(x[:2], target=target, stage_kwargs={"scale": scale})


def test_a_step_leaves_nothing_alive() -> None:
    stages = stages_of(2)
    seen: list[weakref.ref] = []
    stages[1].register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output.untyped_storage())))
    pipe = Pipeline(stages, schedule="zb-h1", n_microbatches=4, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    gc.collect()
    gc.disable()
    try:
        pipe.step(torch.randn(4, 4, DIM), target=torch.randn(4, 4, DIM))
        assert len(seen) == 4
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_state_dict_round_trip() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = Pipeline(
        model, cuts=["2"], schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport()
    )
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    pipe.load_state_dict(state)
    assert pipe.state_dict().keys() == state.keys()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name])
    with pytest.raises(PipelineError, match=r"got none for 0\.bias"):
        pipe.load_state_dict({"0.weight": state["0.weight"]})


class TestMistakes:
    def pipe(self, **options: Any) -> Pipeline:
        arguments = {"schedule": "1f1b", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss} | options
        return Pipeline(arguments.pop("stages", stages_of(2)), transport=LocalTransport(), **arguments)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"stages": {}}, "stages must be {stage index: module}; got none"),
            ({"stages": {0: nn.Linear(2, 2)}}, r"rank 1 must hold the stages \[1\].*got no stage 1, but \[0\]"),
            ({"stages": stages_of(3)}, r"places only the stages \[0, 1\] here; got stage 2 too"),
            ({"n_microbatches": None}, "a schedule given by name needs n_microbatches"),
            ({"schedule": schedule.make("1f1b", ranks=3, microbatches=2)}, "is for 3 ranks; got 2 ranks"),
            ({"skips": {"a": (1, 0)}}, "a skip must lead from a stage to a later one"),
            ({"tied": [("nothing",)]}, "tied must name parameters that some stage has; got 'nothing'"),
            ({"ranks": None}, "a pipeline in one process needs the number of ranks"),
        ],
    )
    def test_when_built(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(PipelineError, match=message):
            self.pipe(**options)

    @pytest.mark.parametrize(
        ("inputs", "target", "message"),
        [
            (
                (torch.randn(1, 4, DIM),),
                torch.randn(2, 4, DIM),
                r"the batch cannot be cut .* into 2 .* shape \(1, 4, 8\)",
            ),
            ((torch.randn(2, 4, DIM),), torch.randn(1, 4, DIM), "the target cannot be cut along dimension 0"),
            ((torch.randn(2, 4, DIM),), None, "training needs a loss and a target .*; got no target"),
            ((), torch.randn(2, 4, DIM), "the rank of the first stage needs the batch; got no inputs"),
        ],
    )
    def test_in_the_batch(self, inputs: tuple[Tensor, ...], target: Tensor | None, message: str) -> None:
        pipe = self.pipe()
        with pytest.raises(PipelineError, match=message):
            pipe.step(*inputs, target=target)
        pipe.step(torch.randn(2, 4, DIM), target=torch.randn(2, 4, DIM))  # nothing was spoiled

    def test_in_a_stage(self) -> None:
        class Broken(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ValueError("no luck")

        pipe = self.pipe(stages={0: gpt(DIM, 1, heads=2), 1: Broken()})
        with pytest.raises(
            PipelineError, match=r"1F0 failed \(rank 1, stage 1, action 0 of the rank\); got ValueError: no luck"
        ):
            pipe.step(torch.randn(2, 4, DIM), target=torch.randn(2, 4, DIM))
        with pytest.raises(PipelineError, match="this pipeline is closed, because it failed"):
            pipe.step(torch.randn(2, 4, DIM), target=torch.randn(2, 4, DIM))

    def test_a_loss_that_is_not_one_number(self) -> None:
        pipe = self.pipe(loss_fn=lambda y, t: (y - t).square())
        with pytest.raises(PipelineError, match=r"loss_fn must return one number; got a tensor of shape \(1, 4, 8\)"):
            pipe.step(torch.randn(2, 4, DIM), target=torch.randn(2, 4, DIM))


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    options: dict[str, Any] = {"n_microbatches": 4, "ranks": 2, "loss_fn": F.mse_loss}
    pipe = Pipeline(model, cuts=["2"], schedule="1f1b", transport=LocalTransport(), **options)
    assert repr(pipe).splitlines() == [
        "Pipeline of 2 stages on 2 ranks",
        "  schedule  1f1b, 4 microbatches",
        "  cuts      2",
        "  here      all ranks: 1.1 KiB of parameters",
        "  planned   bubble 20.0%, if F, I and W take equally long",
    ]
    x = torch.randn(8, DIM)
    lines = str(pipe.step(x, target=x, return_outputs=True)).splitlines()
    assert [line.split()[0] for line in lines] == ["StepResult", "loss", "outputs", "measured", "idle"]
    assert lines[2] == "  outputs   of 4 microbatches"
    assert pipe.evaluate(x).loss is None
    assert "loss      not on this rank" in repr(pipe.evaluate(x))

    found = pipeline.Profile(
        names=("a", "b.c"), F=(1e-3, 2e-3), I=(1e-3, 1e-3), W=(1e-3, 1e-3), B=(2e-3, 2e-3),
        bytes_after_F=(1024, 2048), bytes_after_I=(512, 0), sent_bytes=(256, 0),
    )  # fmt: skip
    assert repr(found).splitlines() == [
        "Profile of 2 stages, one microbatch",
        "  stage   F ms   I ms   W ms   B ms  kept after F  after I   sent",
        "  a      1.000  1.000  1.000  2.000       1.0 KiB    512 B  256 B",
        "  b.c    2.000  1.000  1.000  2.000       2.0 KiB      0 B    0 B",
        "  total  3.000  2.000  2.000  4.000       3.0 KiB    512 B",
    ]
    one = (1e-3,) * 4
    four = pipeline.Profile(
        names=("0", "1", "2", "3"), F=one, I=one, W=one, B=tuple(2 * each for each in one),
        bytes_after_F=(1024,) * 4, bytes_after_I=(512,) * 4, sent_bytes=(256,) * 4,
    )  # fmt: skip
    monkeypatch.setattr(_measure, "profile", lambda *arguments, **options: four)
    pipe = Pipeline(model, cuts=["2"], schedule="1f1b", sample=x, transport=LocalTransport(), **options)
    # Rank 0 keeps two microbatches at most, each with 1 KiB in both of its modules.
    assert repr(pipe).splitlines()[-1] == "  planned   30.00 ms, bubble 20.0%, activations of at most 4.0 KiB on a rank"
