"""Training steps of a pipeline of FSDP2 stages, by torch.distributed.pipelining's schedules and by ours, in one run.

    python benchmarks/sharded/main.py [--device cuda] [--dim 2048] [--rounds N] [--steps N] [--json]

Four processes: pp=2 × dp_shard=2. Eight GPT blocks, each sharded by ``fully_shard``, and eight microbatches. On a GPU,
which the processes share as small GPUs (``tests/small_gpus.py``), over NCCL: float32 parameters that are gathered in
bfloat16 and reduced in float32, microbatches of 4 × 512 tokens. On CPUs, over gloo: all in float32, 2 × 64 tokens.

All rows are built once; "auto" then tries plans in steps of its own, and keeps the best. Each round times each row in
turn: some steps that follow each other. A step is forward and backward of the batch with its reductions; gradients are
set to None before it. Peak memory is the largest of any process while the steps are timed, less what the other rows
hold. Rows must agree in the norm of their gradients.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from models import gpt

from gloo import free_port, join_group
from sharded_cases import counting
from small_gpus import become_small_gpu, mps
from sternway import pipeline

PIPELINE, SHARDS, BLOCKS, MICROBATCHES = 2, 2, 8, 8
WARM_UP = 2  # steps after a row is built
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
TORCH = (*LOOPED, "ScheduleZBVZeroBubble")
OURS = ("1f1b", "interleaved-1f1b", "zb-h2", "zb-v", "auto")
SAME = 0.02  # bfloat16

Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    device: str
    dim: int
    rows: int  # of a microbatch
    length: int
    rounds: int
    steps: int  # in one timing
    trials: int  # steps in which "auto" tries plans

    def blocks(self) -> nn.Sequential:
        torch.manual_seed(0)
        with torch.device(self.device):
            return gpt(self.dim, BLOCKS, heads=max(2, self.dim // 128))

    def batch(self, copy: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1 + copy)
        shape = MICROBATCHES * self.rows, self.length, self.dim
        x, target = (torch.randn(shape, device=self.device) for _ in range(2))
        return x, target


def shard(stage: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """As torchtitan shards stages of a pipeline: every block, and what is left; nothing is freed after a forward."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if mesh.device_type == "cuda" else MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if isinstance(stage, nn.Sequential):
        fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


@dataclass
class BuiltRow:
    """A pipeline of this process.

    Attributes:
        step: one step with the batch.
        parameters: those that are here.
        pipe: ours; None for torch's.
        held: the bytes that it holds between steps.
    """

    step: Step
    parameters: list[nn.Parameter]
    pipe: pipeline.Pipeline | None = None
    held: int = 0

    def run(self, count: int, x: Tensor, target: Tensor) -> None:
        for _ in range(count):
            self.drop_grads()
            self.step(x, target)

    def drop_grads(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def torch_row(name: str, mesh: DeviceMesh, case: Case) -> BuiltRow:
    """By a schedule of torch's."""
    rank = mesh.get_local_rank("pp")
    mine = [rank, rank + PIPELINE] if name in LOOPED else [rank, 2 * PIPELINE - 1 - rank]
    count, blocks = 2 * PIPELINE, list(case.blocks())
    size, device = BLOCKS // count, torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
    parts = [nn.Sequential(*blocks[i * size : (i + 1) * size]) for i in mine]
    for part in parts:
        shard(part, list(part), mesh["dp_shard"])
    stages = [
        pipelining.PipelineStage(part, i, count, device, group=mesh.get_group("pp"))
        for i, part in zip(mine, parts, strict=True)
    ]
    plan = getattr(torchs, name)(stages, MICROBATCHES, loss_fn=loss_fn)
    del blocks

    def step(x: Tensor, target: Tensor) -> None:
        arguments = (x,) if 0 in mine else ()
        options: dict[str, Any] = {"target": target, "losses": []} if count - 1 in mine else {}
        plan.step(*arguments, **options)

    return BuiltRow(step, [parameter for part in parts for parameter in part.parameters()])


def our_row(name: str, mesh: DeviceMesh, case: Case) -> BuiltRow:
    """By a schedule of ours."""
    x, target = case.batch(0)
    pipe = pipeline.Pipeline(
        case.blocks(), schedule=name, n_microbatches=MICROBATCHES, loss_fn=loss_fn, mesh=mesh,
        sample=x[: case.rows], sample_target=target[: case.rows],
        shard=lambda stage: shard(stage, list(stage.children()), mesh["dp_shard"]),
    )  # fmt: skip
    return BuiltRow(lambda x, target: pipe.step(x, target=target, record=False), list(pipe.parameters()), pipe)


def whole_bytes(tensors: list[Tensor]) -> int:
    """What a collective of FSDP gathers or reduces: of its tensors the largest, of which the others are shards."""
    return max(tensor.nbytes for tensor in tensors)


def run(rank: int, port: int, case: Case, shared: dict[str, str], names: list[list[str]], results: Any) -> None:
    world = PIPELINE * SHARDS
    if case.device == "cuda":
        become_small_gpu(rank, world, port, "both", shared, timeout=900)
    else:
        join_group(rank, world, port)
    mesh = init_device_mesh(case.device, (PIPELINE, SHARDS), mesh_dim_names=("pp", "dp_shard"))
    found = measure(rank, mesh, case, *names)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, mesh: DeviceMesh, case: Case, theirs: list[str], ours: list[str]) -> dict[str, dict[str, Any]]:
    x, target = case.batch(mesh.get_local_rank("dp_shard"))
    together = dist.new_group(backend="gloo")
    makers: dict[str, Callable[[], BuiltRow]] = {
        "torch " + name.removeprefix("Schedule"): functools.partial(torch_row, name, mesh, case) for name in theirs
    }
    makers |= {"sternway " + name: functools.partial(our_row, name, mesh, case) for name in ours}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in makers}
    rows: dict[str, BuiltRow] = {}
    begun = time.perf_counter()
    for name, make in makers.items():
        before = _allocated(case)
        row = rows[name] = make()
        row.run(WARM_UP, x, target)
        _note(found[name], together, "norm", _square(row.parameters), sum_up=True)
        if row.pipe is not None and name.endswith("auto"):
            row.run(case.trials, x, target)
            row.pipe.stop_tuning()
        row.drop_grads()
        row.held = _allocated(case) - before
        if rank == 0:
            plans = [] if row.pipe is None else [str(plan) for plan in row.pipe.plans]
            kept = "" if row.pipe is None else f", {row.pipe.schedule.name} of {row.pipe.schedule.num_stages} stages"
            said = "".join(f"\n    {plan}" for plan in plans)
            sys.stderr.write(f"{time.perf_counter() - begun:.0f} s: {name} is built{kept}{said}\n")
    for _ in range(case.rounds):
        for name, row in rows.items():
            _time(case, row, x, target, functools.partial(_note, found[name], together), together)
            if rank == 0:
                last = {what: round(values[-1], 4) for what, values in found[name].items()}
                sys.stderr.write(f"{time.perf_counter() - begun:.0f} s: {name}: {last}\n")
    _check(found)
    for row in rows.values():
        if row.pipe is not None:
            row.pipe.close()
    medians = {name: {what: statistics.median(values) for what, values in each.items()} for name, each in found.items()}
    return {name: {**medians[name], "all_ms": found[name]["ms"]} for name in found}


def _allocated(case: Case) -> int:
    """The bytes that this process holds on its GPU; 0 on a CPU."""
    gc.collect()
    if case.device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _time(case: Case, row: BuiltRow, x: Tensor, target: Tensor, note: Callable[..., None], together: Any) -> None:
    """Time some steps of a row, after one that finds the memory."""
    on_gpu = case.device == "cuda"
    row.run(1, x, target)
    row.drop_grads()
    others = _allocated(case) - row.held
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    row.run(1, x, target)
    peak = torch.cuda.max_memory_allocated() - others if on_gpu else 0
    with counting(whole_bytes) as counts:
        dist.barrier(together)
        start = time.perf_counter()
        row.run(case.steps, x, target)
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier(together)
        note("ms", 1e3 * (time.perf_counter() - start) / case.steps)
    if on_gpu:
        peak = max(peak, torch.cuda.max_memory_allocated() - others)
    row.drop_grads()
    note("peak_gib", peak / 2**30)
    gathered, reduced = counts.values()
    note("gathered_mib", gathered / case.steps / 2**20)
    note("reduced_mib", reduced / case.steps / 2**20)


def _note(into: dict[str, list[float]], together: Any, what: str, value: float, sum_up: bool = False) -> None:
    """Note the largest of all processes, or their sum."""
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.SUM if sum_up else dist.ReduceOp.MAX, group=together)
    into.setdefault(what, []).append(float(number))


def _square(parameters: list[nn.Parameter]) -> float:
    grads = [parameter.grad for parameter in parameters]
    assert all(isinstance(grad, DTensor) for grad in grads), "every parameter has a sharded gradient"
    return float(sum(grad.to_local().double().square().sum() for grad in grads if isinstance(grad, DTensor)))


def _check(found: dict[str, dict[str, list[float]]]) -> None:
    """Raise if rows computed different gradients."""
    norms = {name: each["norm"][0] for name, each in found.items()}
    middle = statistics.median(norms.values())
    wrong = {name: norm for name, norm in norms.items() if abs(norm / middle - 1) > SAME}
    assert not wrong, f"gradients differ from the others', whose squared norm is {middle}: {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dim", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps that follow each other in one timing")
    parser.add_argument("--trials", type=int, default=50, help='steps in which "auto" tries plans before it is timed')
    parser.add_argument("--ours", default=",".join(OURS))
    parser.add_argument("--torchs", default=",".join(TORCH))
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    case = Case(
        arguments.device, arguments.dim or (2048 if on_gpu else 256), 4 if on_gpu else 2, 512 if on_gpu else 64,
        arguments.rounds, arguments.steps, arguments.trials,
    )  # fmt: skip
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port, shared = free_port(), mps() if on_gpu else {}
    names = [[name for name in text.split(",") if name] for text in (arguments.torchs, arguments.ours)]
    processes = [
        context.Process(target=run, args=(rank, port, case, shared, names, results))
        for rank in range(PIPELINE * SHARDS)
    ]
    for process in processes:
        process.start()
    while results.empty() and not any(process.exitcode for process in processes):
        time.sleep(0.1)
    if results.empty():
        for process in processes:
            process.kill()
        raise SystemExit("a process has failed: see above")
    rows = results.get()
    for process in processes:
        process.join()
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "case": vars(case), "rows": rows}))
    else:
        print_table(rows, case)


def print_table(rows: dict[str, dict[str, Any]], case: Case) -> None:
    print(f"torch {torch.__version__}, d={case.dim}, {case.rounds} rounds of {case.steps} steps on {case.device}\n")
    print("| | step, ms | peak, GiB | gathered, MiB | reduced, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        cells = f"{row['ms']:.1f} | {row['peak_gib']:.2f} | {row['gathered_mib']:.1f} | {row['reduced_mib']:.1f}"
        print(f"| {name} | {cells} |")
    best = {
        who: min((r["ms"], n) for n, r in rows.items() if n.startswith(who))
        for who in ("torch", "sternway")
        if any(n.startswith(who) for n in rows)
    }
    if len(best) == 2:
        (theirs, their_name), (ours, our_name) = best["torch"], best["sternway"]
        print(f"\n**{our_name} over {their_name}: {theirs / ours:.2f} times as fast**")
        auto = rows.get("sternway auto")
        if auto is not None:
            print(f"**sternway auto over {their_name}: {theirs / auto['ms']:.2f} times as fast**")


if __name__ == "__main__":
    main()
