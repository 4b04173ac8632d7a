"""What the GPU itself does in F + I + W: the sum of all kernels' times, and an optimizer's step as a graph.

    python benchmarks/split/kernels.py [--dim 4096]

Where a GPU is busy all the time, launches cost nothing, and the ways differ by their kernels alone: an extra pass over
the gradients shows here. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import gpt

from sternway import split

ROUNDS = 5


def kernels(name: str, step: Callable[[], None]) -> None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(ROUNDS):
            step()
        torch.cuda.synchronize()
    found = sorted(recorded.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in found)
    print(f"{name}: {total / ROUNDS / 1e3:.2f} ms", flush=True)
    for each in found[:9]:
        print(f"   {each.self_device_time_total / ROUNDS / 1e3:7.3f} {each.count // ROUNDS:4d} {each.key[:90]}")


def backwards(dim: int) -> None:
    model = gpt(dim, 8, heads=dim // 64).cuda().bfloat16()
    mine = copy.deepcopy(model)
    x = torch.randn(4, 512, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    stage = split.capture(mine, x)
    ways: dict[str, Callable[[], None]] = {
        "fused": lambda: model(x).backward(grad),
        "split": lambda: split.backward_input(model(x), grad, x)[1].run(),
        "captured": lambda: split.backward_input(stage(x), grad, x)[1].run(),
    }
    for _ in range(4):
        for step in ways.values():
            step()
    for name, step in ways.items():
        kernels(name, step)
    for parameter in mine.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
    ways["captured"]()
    kernels("captured, into a .grad that is not the graphs' own", ways["captured"])


def steps() -> None:
    model = gpt(512, 8, heads=8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for name, step in (("optimizer.step()", optimizer.step), ("capture_step", split.capture_step(optimizer))):
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            host = time.perf_counter() - start
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start, host))
        whole, host = sorted(times)[15]
        print(f"AdamW, {name}: {1e3 * whole:.2f} ms, of the host {1e3 * host:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=4096)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, GPT d={arguments.dim}")
    backwards(arguments.dim)
    steps()


if __name__ == "__main__":
    main()
