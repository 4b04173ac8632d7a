"""The split beside the fused backward and torch's own split, in one run.

    python benchmarks/split/main.py [--device cpu|cuda] [--json] [--rounds N] [--only WORD]

Each round times the three ways one after the other on a fresh forward; a ratio is the median of the rounds' own
ratios, so that a slow moment of the machine touches both sides of it. Gradients accumulate, as they do over the
microbatches of a step. The cycle collector is off while the clock runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import convnet, gpt, llama

from sternway import split

MIB = 2**20


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    checkpointed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table; the times in milliseconds, each the median over the rounds."""

    case: str
    fused_ms: float
    torch_i_ms: float
    torch_w_ms: float
    i_ms: float
    w_ms: float
    torch_ratio: float  # (I + W) / fused
    ratio: float
    torch_held: float  # bytes held after I / bytes held after F
    held: float
    held_after_f_mib: float
    recomputes: str  # fused / torch's / ours, for one backward; "" without checkpointing
    deferred_flops: float  # share of the weight gradients' floating-point operations that W does


def cases(device: str) -> list[Case]:
    if device == "cuda":
        tokens = (4, 1024)
        return [
            *(Case(f"GPT d={d}", lambda d=d: gpt(d, 8, heads=d // 64), (*tokens, d)) for d in (512, 1024, 2048, 4096)),
            Case("Llama d=2048", lambda: llama(2048, 8, heads=16, groups=4), (*tokens, 2048)),
            Case("convnet c=128", lambda: convnet(128, 8), (32, 3, 64, 64)),
            Case("GPT d=1024, checkpointed", lambda: gpt(1024, 8, heads=16), (*tokens, 1024), checkpointed=True),
            Case("GPT d=2048, checkpointed", lambda: gpt(2048, 8, heads=32), (*tokens, 2048), checkpointed=True),
        ]
    tokens = (2, 64)
    return [
        *(Case(f"GPT d={d}", lambda d=d: gpt(d, 8), (*tokens, d)) for d in (64, 128, 256, 512)),
        Case("Llama d=256", lambda: llama(256, 8), (*tokens, 256)),
        Case("convnet c=32", lambda: convnet(32, 6), (8, 3, 24, 24)),
        Case("GPT d=64, checkpointed", lambda: gpt(64, 8), (*tokens, 64), checkpointed=True),
        Case("GPT d=256, checkpointed", lambda: gpt(256, 8), (*tokens, 256), checkpointed=True),
    ]


class Bench:
    """One model, ready to run forward and backward in each of the three ways."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.device, self.checkpointed, self.forwards = device, case.checkpointed, 0
        self.model = case.make().to(device, dtype)
        self.x = torch.randn(case.shape, device=device, dtype=dtype)
        self.grad = torch.randn_like(self.model(self.x))

    def forward(self) -> tuple[Tensor, Tensor]:
        x = y = self.x.clone().requires_grad_()
        for block in self.model:
            y = checkpoint(self._count, block, y, use_reentrant=False) if self.checkpointed else block(y)
        return x, y

    def _count(self, block: nn.Module, x: Tensor) -> Tensor:
        self.forwards += 1
        return block(x)

    def fused(self, x: Tensor, y: Tensor) -> Callable[[], None]:
        y.backward(self.grad)
        return lambda: None

    def torchs(self, x: Tensor, y: Tensor) -> Callable[[], Any]:
        _, groups = torchs.stage_backward_input([y], [self.grad], [x], self.model.parameters())
        return lambda: torchs.stage_backward_weight(self.model.parameters(), groups)

    def ours(self, x: Tensor, y: Tensor) -> Callable[[], None]:
        _, pending = split.backward_input(y, self.grad, x)
        return pending.run

    def ways(self) -> dict[str, Callable[[Tensor, Tensor], Callable[[], Any]]]:
        return {"fused": self.fused, "torch": self.torchs, "ours": self.ours}

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, way: Callable[[Tensor, Tensor], Callable[[], Any]]) -> tuple[float, float]:
        """Seconds of I (or of the whole backward) and of W."""
        x, y = self.forward()
        self.wait()
        start = time.perf_counter()
        weights = way(x, y)
        self.wait()
        middle = time.perf_counter()
        weights()
        self.wait()
        return middle - start, time.perf_counter() - middle


def measure(case: Case, device: str, rounds: int) -> Row:
    bench = Bench(case, device)
    check_gradients(bench)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in bench.ways()}
    for _ in range(3):
        for way in bench.ways().values():
            bench.timed(way)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, way in bench.ways().items():
            times[name].append(bench.timed(way))
    gc.enable()

    def ratio(name: str) -> float:
        pairs = zip(times[name], times["fused"], strict=True)
        return statistics.median((i + w) / fused for (i, w), (fused, _) in pairs)

    def median_ms(name: str, half: int) -> float:
        return 1e3 * statistics.median(pair[half] for pair in times[name])

    after_f, torch_held = held_bytes(bench, bench.torchs)
    _, held = held_bytes(bench, bench.ours)
    return Row(
        case=case.name,
        fused_ms=median_ms("fused", 0),
        torch_i_ms=median_ms("torch", 0),
        torch_w_ms=median_ms("torch", 1),
        i_ms=median_ms("ours", 0),
        w_ms=median_ms("ours", 1),
        torch_ratio=ratio("torch"),
        ratio=ratio("ours"),
        torch_held=torch_held / after_f,
        held=held / after_f,
        held_after_f_mib=after_f / MIB,
        recomputes=recomputes(bench) if case.checkpointed else "",
        deferred_flops=deferred_flops(bench),
    )


def check_gradients(bench: Bench) -> None:
    """A fast answer must be the right one: ours against the fused backward's."""
    results = {}
    for name in ("fused", "ours"):
        bench.model.zero_grad()
        for module in bench.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        bench.ways()[name](*bench.forward())()
        results[name] = [parameter.grad.float() for parameter in bench.model.parameters()]
    for mine, theirs in zip(results["ours"], results["fused"], strict=True):
        error = ((mine - theirs).norm() / theirs.norm()).item()
        limit = 2e-2 if bench.grad.dtype == torch.bfloat16 else 1e-4
        if not error < limit:
            raise SystemExit(f"gradients differ: relative error {error:.2e}, limit {limit:.0e}")


class _Storages(TorchDispatchMode):
    """Counts the bytes of every storage made under it that is still alive: the CPU allocator does not."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in self.alive:
                    self.alive[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, id(storage), None)
        return out


@contextmanager
def _counting(device: str) -> Iterator[Callable[[], int]]:
    """A function that tells how many bytes are allocated now, over when the block began."""
    if device == "cuda":
        start = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - start
    else:
        with _Storages() as storages:
            yield lambda: sum(storages.alive.values())


def held_bytes(bench: Bench, way: Callable[[Tensor, Tensor], Callable[[], Any]]) -> tuple[int, int]:
    """Bytes that are alive after the forward, and after I, once the outputs and the input's gradient are gone."""
    gc.collect()
    with _counting(bench.device) as alive:
        x, y = bench.forward()
        bench.wait()
        after_f = alive()
        weights = way(x, y)
        x.grad = None
        del y
        bench.wait()
        after_i = alive()
        weights()
    return after_f, after_i


def recomputes(bench: Bench) -> str:
    counts = []
    for way in bench.ways().values():
        x, y = bench.forward()
        before = bench.forwards
        way(x, y)()
        counts.append(str(bench.forwards - before))
    return "/".join(counts)


class _Flops(TorchDispatchMode):
    """Floating-point operations, by torch's own formulas; torch's counter does not know the in-place products."""

    in_place: ClassVar = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        packet = self.in_place.get(function._overloadpacket, function._overloadpacket)
        if formula := flop_registry.get(packet):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def deferred_flops(bench: Bench) -> float:
    """What W computes, over what the fused backward computes for the weights."""

    def flops(function: Callable[[], Any]) -> int:
        with _Flops() as counter:
            function()
        return counter.total

    x, y = bench.forward()
    whole = flops(lambda: y.backward(bench.grad))
    x, y = bench.forward()
    inputs = flops(lambda: torch.autograd.grad(y, x, bench.grad))
    x, y = bench.forward()
    weights = flops(bench.ours(x, y))
    return weights / (whole - inputs)


HEADER = (
    "| case | fused ms | torch I + W ms | **ours** I + W ms | torch (I+W)/fused | **ours** (I+W)/fused "
    "| torch held after I / after F | **ours** held | recomputes fused/torch/ours | FLOPs deferred |\n"
    + "| --- " * 10
    + "|"
)


def line(row: Row) -> str:
    return (
        f"| {row.case} | {row.fused_ms:.2f} | {row.torch_i_ms:.2f} + {row.torch_w_ms:.2f} "
        f"| {row.i_ms:.2f} + {row.w_ms:.2f} | {row.torch_ratio:.2f} | **{row.ratio:.2f}** "
        f"| {row.torch_held:.2f} | **{row.held:.2f}** | {row.recomputes or '–'} | {row.deferred_flops:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU, one thread"
    rows = []
    if not arguments.json:
        print(f"torch {torch.__version__}, {machine}, {arguments.rounds} rounds\n\n{HEADER}", flush=True)
    for case in cases(arguments.device):
        if arguments.only in case.name:
            rows.append(measure(case, arguments.device, arguments.rounds))
            if not arguments.json:
                print(line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "machine": machine, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
