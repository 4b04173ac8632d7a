"""The split beside the fused backward and torch's own split, in one run.

    python benchmarks/split/main.py [--device cpu|cuda] [--json] [--rounds N] [--only WORD] [--table backward|graphs]
        [--trim] [--native]

Each round times the ways one after the other on a fresh forward; a ratio is the median of the rounds' own
ratios, so that a slow moment of the machine touches both sides of it. Gradients accumulate, as they do over the
microbatches of a step. The cycle collector is off while the clock runs. On a GPU there is a second table, of CUDA
graphs: ``graphs.py``.

On the CPU, the clock is that of the thread, which others on the machine do not move. And glibc gives memory back to the
system when much of it is free, and takes it again page by page: that costs most where much is held and then freed at
once, as after W. So glibc is told to keep it, for all ways alike, as CUDA's allocator does; ``--trim`` leaves it as it
is. With ``--native`` there is a column more: ours with ``split.accelerate()``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flops import flops
from graphs import GRAPHS_HEADER, GraphRow, graphs_line, measure_graphs
from models import convnet, gpt, llama

from sternway import split
from sternway.demo import ThreeWays


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
    exact_ratio: float  # with exact=True
    native_ratio: float | None  # with the extension in C++
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


class Counted:
    """Calls the model block by block, each under a checkpoint if asked, and counts the calls."""

    def __init__(self, model: nn.Module, checkpointed: bool) -> None:
        self.model, self.checkpointed, self.calls = model, checkpointed, 0

    def __call__(self, x: Tensor) -> Tensor:
        for block in self.model:
            x = checkpoint(self._call, block, x, use_reentrant=False) if self.checkpointed else self._call(block, x)
        return x

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return block(x)


def measure(case: Case, device: str, rounds: int, native: bool) -> Row:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = case.make().to(device, dtype)
    counted = Counted(model, case.checkpointed)
    stage = ThreeWays(model, torch.randn(case.shape, device=device, dtype=dtype), counted)
    error, limit = stage.worst_error(), 2e-2 if device == "cuda" else 1e-4
    if not error < limit:  # a fast answer must be the right one
        raise SystemExit(f"{case.name}: gradients differ, relative error {error:.1e}, limit {limit:.0e}")
    stage.ways["exact"] = lambda x, y: split.backward_input(y, stage.grad, x, exact=True, own_thread=True)[1].run
    if native:
        stage.ways["native"] = lambda x, y: accelerated(lambda: stage.ways["sternway"](x, y))
        if not (error := accelerated(stage.worst_error)) < limit:
            raise SystemExit(f"{case.name}: gradients of the extension differ, relative error {error:.1e}")
    times = stage.time(rounds)
    stage.ways.pop("native", None)
    del stage.ways["exact"]
    after_f, torch_held = stage.held("torch")
    _, held = stage.held("sternway")
    return Row(
        case=case.name,
        fused_ms=times["fused"].i,
        torch_i_ms=times["torch"].i,
        torch_w_ms=times["torch"].w,
        i_ms=times["sternway"].i,
        w_ms=times["sternway"].w,
        torch_ratio=times["torch"].ratio,
        ratio=times["sternway"].ratio,
        exact_ratio=times["exact"].ratio,
        native_ratio=times["native"].ratio if native else None,
        torch_held=torch_held / after_f,
        held=held / after_f,
        held_after_f_mib=after_f / 2**20,
        recomputes=recomputes(stage, counted) if case.checkpointed else "",
        deferred_flops=deferred_flops(stage),
    )


def accelerated(call: Callable[[], Any]) -> Any:
    """What a call gives with the extension in C++, which is switched off again."""
    split.accelerate()
    try:
        return call()
    finally:
        split.accelerate(False)


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to give no memory back; whether it heeds that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    most, trim_threshold, mmap_threshold = 2**30, -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt and mallopt(mmap_threshold, most) and mallopt(trim_threshold, 2**31 - 1))


def recomputes(stage: ThreeWays, counted: Counted) -> str:
    counts = []
    for way in stage.ways.values():
        x, y = stage.forward()
        before = counted.calls
        way(x, y)()
        counts.append(str(counted.calls - before))
    return "/".join(counts)


def deferred_flops(stage: ThreeWays) -> float:
    """What W computes, over what the fused backward computes for the weights."""
    x, y = stage.forward()
    whole = flops(lambda: y.backward(stage.grad))
    x, y = stage.forward()
    inputs = flops(lambda: torch.autograd.grad(y, x, stage.grad))
    x, y = stage.forward()
    weights = flops(stage.ways["sternway"](x, y))
    return weights / (whole - inputs)


HEADER = (
    "| case | fused ms | torch I + W ms | **ours** I + W ms | torch (I+W)/fused | **ours** (I+W)/fused "
    "| ours, accelerated | ours, exact | torch held after I / after F | **ours** held "
    "| recomputes fused/torch/ours | FLOPs deferred |\n" + "| --- " * 12 + "|"
)


def line(row: Row) -> str:
    return (
        f"| {row.case} | {row.fused_ms:.2f} | {row.torch_i_ms:.2f} + {row.torch_w_ms:.2f} "
        f"| {row.i_ms:.2f} + {row.w_ms:.2f} | {row.torch_ratio:.2f} | **{row.ratio:.2f}** "
        f"| {'–' if row.native_ratio is None else f'{row.native_ratio:.2f}'} | {row.exact_ratio:.2f} "
        f"| {row.torch_held:.2f} | **{row.held:.2f}** | {row.recomputes or '–'} | {row.deferred_flops:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--table", choices=["backward", "graphs"], help="one of the two tables")
    parser.add_argument("--native", action="store_true", help="ours with split.accelerate(), too")
    parser.add_argument("--trim", action="store_true", help="let malloc give free memory back to the system")
    arguments = parser.parse_args()
    kept = arguments.device == "cpu" and not arguments.trim and keep_freed_memory()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU, one thread"
    chosen = [case for case in cases(arguments.device) if arguments.only in case.name]
    rows: list[Row] = []
    graphs: list[GraphRow] = []
    say = (lambda text: None) if arguments.json else (lambda text: print(text, flush=True))
    say(f"torch {torch.__version__}, {machine}, {arguments.rounds} rounds" + ", malloc keeps memory" * kept)
    if arguments.table != "graphs":
        say(f"\n{HEADER}")
        for case in chosen:
            rows.append(measure(case, arguments.device, arguments.rounds, arguments.native))
            say(line(rows[-1]))
    if arguments.table != "backward" and arguments.device == "cuda":
        say(f"\n{GRAPHS_HEADER}")
        for case in [case for case in chosen if not case.checkpointed]:
            shape = (4, 512, case.shape[2]) if len(case.shape) == 3 else case.shape
            model, x = case.make().cuda().bfloat16(), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            graphs.append(measure_graphs(case.name, model, x, arguments.rounds, compiled="GPT" in case.name))
            say(graphs_line(graphs[-1]))
    if arguments.json:
        found = {"rows": [asdict(row) for row in rows], "graphs": [asdict(row) for row in graphs]}
        print(json.dumps({"torch": torch.__version__, "machine": machine, **found}))


if __name__ == "__main__":
    main()
