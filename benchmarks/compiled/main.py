"""F, I and W compiled, beside eager, Inductor's own fused backward and torch's split, in one run.

    python benchmarks/compiled/main.py [--device cpu|cuda] [--json] [--rounds N] [--only WORD] [--regions block|model]

Each round runs every way once, one after the other, each on a fresh forward; a ratio is the median of the rounds' own
ratios. Gradients accumulate, as they do over the microbatches of a step. On the CPU the clock is the thread's own
processor time, since one thread does all the work; on a GPU it is the wall clock around a synchronised step.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import gpt, llama

from sternway import split
from sternway.split.compiled._backend import sternway

Seconds = tuple[float, float, float]  # F, I, W


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, each the median over the rounds."""

    case: str
    regions: str  # what is compiled as one: a block (one code for all of them), or the model
    eager_f_ms: float
    eager_b_ms: float
    torch_i_ms: float  # torch's split, in eager: it refuses compiled modules
    torch_w_ms: float
    inductor_f_ms: float
    inductor_b_ms: float
    f_ms: float
    i_ms: float
    w_ms: float
    step_ratio: float  # (F + I + W) / eager's F + B
    backward_ratio: float  # (I + W) / Inductor's B
    inductor_step_ratio: float  # Inductor's F + B / eager's F + B
    held_after_f_mib: float
    held_after_i_mib: float
    w_share_of_backward_flops: float
    compile_s: float


def cases(device: str) -> list[Case]:
    if device == "cuda":
        tokens = (4, 1024)
        sizes = (512, 1024, 2048, 4096)
        return [Case(f"GPT d={d}", lambda d=d: gpt(d, 8, heads=d // 64), (*tokens, d)) for d in sizes]
    tokens = (2, 64)
    return [
        *(Case(f"GPT d={d}", lambda d=d: gpt(d, 8), (*tokens, d)) for d in (64, 128, 256, 512)),
        Case("Llama d=128", lambda: llama(128, 8), (*tokens, 128)),
    ]


class Ways:
    """One model, run in each way."""

    def __init__(self, case: Case, device: str, regions: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.device = device
        self.model = case.make().to(device, dtype)
        self.x = torch.randn(case.shape, device=device, dtype=dtype)
        self.grad = torch.randn_like(self.x)
        self.inductor = self._compiled(regions, "inductor")
        self.ours = self._compiled(regions, sternway)
        self.all: dict[str, Callable[[], Seconds]] = {
            "eager": lambda: self._fused(self.model),
            "torch": self._torch,
            "inductor": lambda: self._fused(self.inductor),
            "ours": self._ours,
        }

    def _compiled(self, regions: str, backend: Any) -> Callable[[Tensor], Tensor]:
        if regions == "model":
            return torch.compile(self.model, backend=backend)
        blocks = [torch.compile(block, backend=backend) for block in self.model]

        def call(x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x)
            return x

        return call

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()

    def _fused(self, model: Callable[[Tensor], Tensor]) -> Seconds:
        x = self.x.clone().requires_grad_()
        start = self.now()
        y = model(x)
        middle = self.now()
        y.backward(self.grad)
        return middle - start, self.now() - middle, 0.0

    def _torch(self) -> Seconds:
        from torch.distributed.pipelining import _backward

        x = self.x.clone().requires_grad_()
        times = [self.now()]
        y = self.model(x)
        times.append(self.now())
        _, groups = _backward.stage_backward_input([y], [self.grad], [x], self.model.parameters())
        times.append(self.now())
        _backward.stage_backward_weight(self.model.parameters(), groups)
        times.append(self.now())
        return _between(times)

    def _ours(self) -> Seconds:
        x = self.x.clone().requires_grad_()
        times = [self.now()]
        y = self.ours(x)
        times.append(self.now())
        _, pending = split.backward_input(y, self.grad, x)
        times.append(self.now())
        pending.run()
        times.append(self.now())
        return _between(times)

    def worst_error(self) -> float:
        """The largest relative difference between a parameter's gradient from ours and from eager."""
        found = []
        for way in ("eager", "ours"):
            self.model.zero_grad()
            self.all[way]()
            found.append([p.grad.double() for p in self.model.parameters()])
        return max(float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(*found, strict=True))

    def held(self) -> tuple[int, int]:
        """Bytes that our F keeps for I and W, and that I keeps for W; parameters apart, each storage once."""
        known = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        x = self.x.clone().requires_grad_()
        y = self.ours(x)
        kept: dict[int, int] = {}
        stack, seen = [y.grad_fn], {y.grad_fn}
        while stack:
            node = stack.pop()
            for tensor in getattr(node, "saved_tensors", ()):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    kept[storage.data_ptr()] = storage.nbytes()
            new = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= new
            stack += new
        _, pending = split.backward_input(y, self.grad, x)
        return sum(kept.values()), pending.nbytes


def _between(times: list[float]) -> Seconds:
    f, i, w = (after - before for before, after in pairwise(times))
    return f, i, w


def measure(case: Case, device: str, rounds: int, regions: str) -> Row:
    torch._dynamo.reset()
    ways = Ways(case, device, regions)
    start = time.perf_counter()
    error, limit = ways.worst_error(), 2e-2 if device == "cuda" else 1e-4
    compile_s = time.perf_counter() - start
    if not error < limit:  # a fast answer must be the right one
        raise SystemExit(f"{case.name}: gradients differ, relative error {error:.1e}, limit {limit:.0e}")
    held_after_f, held_after_i = ways.held()
    seconds: dict[str, list[Seconds]] = {name: [] for name in ways.all}
    for _ in range(3):
        for way in ways.all.values():
            way()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, way in ways.all.items():
                seconds[name].append(way())
    finally:
        gc.enable()

    def ms(name: str, which: int) -> float:
        return 1e3 * statistics.median(times[which] for times in seconds[name])

    def ratio(name: str, other: str, first: int) -> float:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return statistics.median(sum(mine[first:]) / sum(theirs[first:]) for mine, theirs in pairs)

    graphs = split.inspect(ways.model)
    i_flops, w_flops = sum(each.I.flops for each in graphs), sum(each.W.flops for each in graphs)
    return Row(
        case=case.name,
        regions=regions,
        eager_f_ms=ms("eager", 0),
        eager_b_ms=ms("eager", 1),
        torch_i_ms=ms("torch", 1),
        torch_w_ms=ms("torch", 2),
        inductor_f_ms=ms("inductor", 0),
        inductor_b_ms=ms("inductor", 1),
        f_ms=ms("ours", 0),
        i_ms=ms("ours", 1),
        w_ms=ms("ours", 2),
        step_ratio=ratio("ours", "eager", 0),
        backward_ratio=ratio("ours", "inductor", 1),
        inductor_step_ratio=ratio("inductor", "eager", 0),
        held_after_f_mib=held_after_f / 2**20,
        held_after_i_mib=held_after_i / 2**20,
        w_share_of_backward_flops=w_flops / (i_flops + w_flops),
        compile_s=compile_s,
    )


HEADER = (
    "| case | region | eager F + B ms | torch's split, eager F + I + W | Inductor F + B | **ours** F + I + W "
    "| **ours** step / eager | Inductor step / eager | **ours** (I + W) / Inductor B | held after F, MiB | after I "
    "| W's share of FLOPs |\n" + "| --- " * 12 + "|"
)


def line(row: Row) -> str:
    return (
        f"| {row.case} | {row.regions} | {row.eager_f_ms:.2f} + {row.eager_b_ms:.2f} "
        f"| {row.eager_f_ms:.2f} + {row.torch_i_ms:.2f} + {row.torch_w_ms:.2f} "
        f"| {row.inductor_f_ms:.2f} + {row.inductor_b_ms:.2f} | {row.f_ms:.2f} + {row.i_ms:.2f} + {row.w_ms:.2f} "
        f"| **{row.step_ratio:.2f}** | {row.inductor_step_ratio:.2f} | **{row.backward_ratio:.2f}** "
        f"| {row.held_after_f_mib:.2f} | {row.held_after_i_mib:.2f} | {row.w_share_of_backward_flops:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, help="by default 40 on the CPU, 10 on a GPU")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--regions", choices=["block", "model"], help="by default model on the CPU, block on a GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = arguments.device == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, one thread"
    rounds = arguments.rounds or (10 if on_gpu else 40)
    regions = arguments.regions or ("block" if on_gpu else "model")
    if not arguments.json:
        print(f"torch {torch.__version__}, {machine}, {rounds} rounds\n\n{HEADER}", flush=True)
    rows = []
    for case in cases(arguments.device):
        if arguments.only in case.name:
            rows.append(measure(case, arguments.device, rounds, regions))
            if not arguments.json:
                print(line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "machine": machine, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
