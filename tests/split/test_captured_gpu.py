"""F, I and W as CUDA graphs, against the same split without graphs to the bit, and against a plain backward."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from captured_cases import CASES, Language, assert_same_bits, compare, dropout, floats, ids
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads, twin
from compiled import compiled
from sternway import split
from sternway.errors import PendingError, SplitError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_split_without_graphs(name: str) -> None:
    make, batch = CASES[name]
    compare(make().cuda(), batch)


def test_bfloat16() -> None:
    compare(gpt(64, 2).cuda().bfloat16(), lambda: torch.randn(2, 16, 64, device="cuda").bfloat16().requires_grad_())


def test_autocast() -> None:
    def wrap(call: Any, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return call(x)

    compare(Language().cuda(), lambda: ids(2, 9), wrap)


def test_a_capture_leaves_random_numbers_and_gradients_alone() -> None:
    model = nn.Sequential(dropout(), nn.BatchNorm1d(16)).cuda()
    x = floats(8, 16)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in grads]
    torch.manual_seed(3)
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    split.capture(model, x, in_flight=2)
    for p, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)
    assert torch.equal(states[0], torch.cuda.get_rng_state())
    assert torch.equal(states[1], torch.get_rng_state())
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_three_in_flight_in_any_order(order: tuple[int, ...]) -> None:
    model = gpt(32, 2).cuda()
    reference = twin(model)[0]
    stage = split.capture(model, floats(2, 8, 32), in_flight=3)
    for number in range(2):
        pendings: list[list[Any]] = [[], []]
        grad = torch.randn(2, 8, 32, device="cuda")
        batches = [floats(2, 8, 32) for _ in range(3)]
        for found, call in zip(pendings, (stage, reference), strict=True):
            outputs = [call(x) for x in batches]
            found += [split.backward_input(y, grad, x)[1] for y, x in zip(outputs, batches, strict=True)]
            for index in order:
                found[index].run()
        if number == 0:
            assert_same_bits(model, reference)
            model.zero_grad()
            reference.zero_grad()
    assert_same_bits(model, reference)
    outputs = [stage(x) for x in batches]
    with pytest.raises(SplitError, match="in_flight=3"):
        stage(batches[0])
    del outputs


@pytest.mark.parametrize("way", ["none", "zeros", "own", "kept", "hooks after F", "plain backward", "exact"])
def test_gradients_whoever_holds_them(way: str) -> None:
    model = gpt(32, 1).cuda()
    reference = twin(model)[0]
    stage = split.capture(model, floats(2, 8, 32))
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(4):
        x = floats(2, 8, 32)
        other = x.detach().clone().requires_grad_()
        grad = torch.randn_like(x)
        outputs = stage(x), reference(other)
        for each in (model, reference):
            if way in ("none", "zeros") and number == 2:
                each.zero_grad(set_to_none=way == "none")
            if way == "kept" and number == 2:
                kept += [(p.grad, p.grad.clone()) for p in each.parameters()]
                each.zero_grad()
            if way == "own" and number == 1:
                for p in each.parameters():
                    p.grad = torch.full_like(p, 2.0)
            if way == "hooks after F" and number == 3:
                each[0].up.weight.register_hook(lambda g: 2 * g)
        outputs[1].backward(grad)
        if way == "plain backward":
            outputs[0].backward(grad)
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=1e-4)
        else:
            split.backward_input(outputs[0], grad, x, exact=way == "exact")[1].run()
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
    for tensor, value in kept:
        assert torch.equal(tensor, value)
    if way == "none":
        stage(floats(2, 8, 32)).sum().backward()
        view = model[0].up.weight.grad[:1]
        model.zero_grad()
        with pytest.raises(PendingError, match="must not be kept"):
            stage(floats(2, 8, 32)).sum().backward()
        del view


@pytest.mark.parametrize("kind", ["sgd", "adamw", "capturable"])
def test_training(kind: str) -> None:
    model = gpt(32, 2).cuda()
    reference = twin(model)[0]
    stage = split.capture(model, floats(2, 8, 32), in_flight=2)
    optimizers = []
    for each in (model, reference):
        if kind == "sgd":
            optimizers.append(torch.optim.SGD(each.parameters(), 0.1, momentum=0.9))
        else:
            optimizers.append(torch.optim.AdamW(each.parameters(), 1e-2, capturable=kind == "capturable"))
    losses: list[list[float]] = [[], []]
    target = torch.randn(2, 8, 32, device="cuda")
    for _ in range(6):
        batches = [floats(2, 8, 32) for _ in range(2)]
        for log, call, optimizer in zip(losses, (stage, reference), optimizers, strict=True):
            outs = [F.mse_loss(call(x), target) for x in batches]
            for loss, x in zip(outs, batches, strict=True):
                split.backward_input(loss, None, x)[1].run()
            log.append(float(sum(outs)))
            nn.utils.clip_grad_norm_((model if call is stage else reference).parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
    assert_same_bits(model, reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_optimizer_step_in_a_graph_of_its_own() -> None:
    model = gpt(32, 1).cuda()
    reference = twin(model)[0]
    stage = split.capture(model, floats(2, 8, 32))
    # Some gradients are zero but for rounding, which AdamW would make large without a large eps.
    mine, theirs = (torch.optim.AdamW(m.parameters(), 1e-2, eps=0.1, capturable=True) for m in (model, reference))
    graph = torch.cuda.CUDAGraph()
    for number in range(4):
        x = floats(2, 8, 32)
        stage(x).sum().backward()
        reference(x).sum().backward()
        if number == 0:
            mine.step()
        elif number == 1:
            with torch.cuda.graph(graph):
                mine.step()
        if number:
            graph.replay()
        theirs.step()
        mine.zero_grad(set_to_none=number % 2 == 0)  # the address stays the same
        theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_new_shapes_and_moved_parameters() -> None:
    model = gpt(32, 1).cuda()
    stage = split.capture(model, floats(2, 8, 32), forms=2)
    for rows in (2, 3, 2, 3):
        reference = twin(model)[0]
        x = floats(rows, 8, 32)
        stage(x).sum().backward()
        reference(x.detach()).sum().backward()
        assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
        model.zero_grad()
    assert stage.sets == 2
    with pytest.warns(UserWarning, match="2 forms of call are known"):
        stage(floats(4, 8, 32)).sum().backward()
    model.bfloat16()
    reference = twin(model)[0]
    reference.zero_grad()
    model.zero_grad()
    x = floats(2, 8, 32).detach().bfloat16()
    stage(x).sum().backward()
    reference(x).sum().backward()
    assert stage.sets == 1
    assert_same_grads(model, reference, rtol=2e-2, atol=2e-2)


def test_on_another_stream_and_in_other_modes() -> None:
    model = nn.Sequential(gpt(32, 1), nn.Dropout(0.5)).cuda()
    stage = split.capture(model, floats(2, 8, 32))
    reference, stream = twin(model)[0], torch.cuda.Stream()
    for seed in range(4):
        stream.wait_stream(torch.cuda.current_stream())
        x = floats(2, 8, 32)
        torch.manual_seed(seed)
        with torch.cuda.stream(stream if seed % 2 else torch.cuda.current_stream()):
            stage(x).sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        torch.manual_seed(seed)
        reference(x.detach()).sum().backward()
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert stage(x).grad_fn is None
    stage.eval()
    torch.testing.assert_close(stage(x), reference.eval()(x), rtol=1e-3, atol=1e-4)


def test_compiled_inside() -> None:
    torch._dynamo.reset()
    model = gpt(64, 2).cuda()
    reference = twin(model)[0]
    stage = split.capture(compiled(model, "inductor"), floats(2, 16, 64), in_flight=2)
    assert stage.refusals == []
    for number in range(3):
        batches = [floats(2, 16, 64) for _ in range(2)]
        grad = torch.randn_like(batches[0])
        outputs = [stage(x) for x in batches]
        pendings = [split.backward_input(y, grad, x) for y, x in zip(outputs, batches, strict=True)]
        for _, pending in pendings[:: -1 if number % 2 else 1]:
            assert len(pending.deferred) == len(list(model.parameters()))
            pending.run()
        for (found, _), x in zip(pendings, batches, strict=True):
            other = x.detach().clone().requires_grad_()
            reference(other).backward(grad)
            torch.testing.assert_close(found, other.grad, rtol=1e-3, atol=1e-4)
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)


def test_what_others_clear_and_replace_is_kept() -> None:
    """Workspaces of cuBLAS that Inductor clears, and a table that the module makes anew for longer inputs."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.zeros(0)]

        def forward(self, x: Tensor) -> Tensor:
            if len(self.tables[0]) < x.shape[1]:
                self.tables[0] = torch.arange(x.shape[1], device=x.device).sin().to(x.dtype)
            return x * self.tables[0][: x.shape[1], None]

    model = nn.Sequential(gpt(1024, 1, heads=16), Positions()).cuda().bfloat16()
    x = torch.randn(4, 64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    reference = twin(model)[0]
    stage = split.capture(model, x)
    with torch.no_grad():
        stage(torch.randn(1, 128, 1024, device="cuda", dtype=torch.bfloat16))
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    grad = torch.randn(4, 64, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        split.backward_input(stage(x), grad, x)[1].run()
        split.backward_input(reference(x), grad, x)[1].run()
    torch.cuda.synchronize()
    assert_same_bits(model, reference)
    assert stage.refusals == []
    del others


def test_memory_of_the_sets() -> None:
    model = gpt(512, 4).cuda().bfloat16()
    x = torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def reserved() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    split.backward_input(model(x).sum(), None, x)[1].run()
    start = reserved(), torch.cuda.memory_allocated()
    outputs = [model(x) for _ in range(3)]
    eager = torch.cuda.memory_allocated() - start[1]
    del outputs
    start = reserved(), torch.cuda.memory_allocated()
    stage = split.capture(model, x, in_flight=3)
    captured = reserved() - start[0]
    buffers = sum(p.nbytes for p in model.parameters())
    # Pools are made of whole segments, and each set has workspaces of cuBLAS.
    assert captured < 2.5 * eager + buffers + 3 * 128 * 2**20, f"{captured:,} bytes in sets, {eager:,} in flight"
    del stage
    assert reserved() - start[0] < captured / 2
