"""F + I + W without the CPU: as CUDA graphs, with Inductor's kernels inside or without, beside a fused F + B.

Part of ``main.py --device cuda``. A round runs each way once, on the same input, and waits for the GPU at its end. A
ratio is the median of the rounds' own ratios to the eager fused F + B.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sternway import split
from sternway.split.compiled._backend import sternway  # by its function: the checkout may not be installed

WAYS = ("fused", "split", "captured", "captured + Inductor", "Inductor, reduce-overhead")


@dataclass(frozen=True)
class GraphRow:
    """One line of the table: milliseconds, ratios to the fused F + B, and the worst error of a gradient, by way."""

    case: str
    ms: dict[str, float]
    ratio: dict[str, float]
    error: dict[str, float]


def measure_graphs(name: str, model: nn.Module, x: Tensor, rounds: int, compiled: bool) -> GraphRow:
    ways = _ways(model, x, compiled)
    error = _errors(ways, x)
    times: dict[str, list[float]] = {way: [] for way in ways}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 3):
            for way, (step, _) in ways.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                if number >= 3:
                    times[way].append(1e3 * (time.perf_counter() - start))
    finally:
        gc.enable()
    ratios = {
        way: statistics.median(t / f for t, f in zip(each, times["fused"], strict=True)) for way, each in times.items()
    }
    return GraphRow(name, {way: statistics.median(each) for way, each in times.items()}, ratios, error)


def _ways(model: nn.Module, x: Tensor, compiled: bool) -> dict[str, tuple[Callable[[], None], nn.Module]]:
    """By name, one microbatch's F and backward, and the model whose gradients it adds to.

    Each way has a model of its own: graphs add to a ``.grad`` that is theirs, and take a pass more for one that is not.
    """
    with torch.no_grad():
        grad = torch.randn_like(model(x))

    def fused() -> None:
        model(x).backward(grad)

    def split_by(call: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            split.backward_input(call(x), grad, x)[1].run()

        return step

    x = x.requires_grad_()
    eager, captured = copy.deepcopy(model), copy.deepcopy(model)
    ways = {"fused": (fused, model), "split": (split_by(eager), eager)}
    ways["captured"] = split_by(split.capture(captured, x)), captured
    if not compiled:
        return ways
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    for block in ours:  # each block for itself: they share their compiled code
        block.compile(backend=sternway)
    ways["captured + Inductor"] = split_by(split.capture(ours, x)), ours
    for block in theirs:
        block.compile(mode="reduce-overhead")
    for parameter in theirs.parameters():  # a .grad must not be in the memory of Inductor's graphs
        parameter.grad = torch.zeros_like(parameter)

    def reduce_overhead() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        theirs(x).backward(grad)

    ways["Inductor, reduce-overhead"] = reduce_overhead, theirs
    return ways


def _errors(ways: dict[str, tuple[Callable[[], None], nn.Module]], x: Tensor) -> dict[str, float]:
    """The largest relative difference between a parameter's gradient and that of the fused backward."""
    found: dict[str, list[Tensor]] = {}
    for way, (step, model) in ways.items():
        for _ in range(3):  # Inductor records its graphs in the second and third run
            step()
        model.zero_grad(set_to_none=False)
        step()
        found[way] = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return {
        way: max(float((mine - fused).norm() / fused.norm()) for mine, fused in zip(each, found["fused"], strict=True))
        for way, each in found.items()
    }


GRAPHS_HEADER = (
    "| case | fused F + B ms | split F + I + W ms | **captured** ms | captured + Inductor ms "
    "| Inductor's reduce-overhead F + B ms | split / fused | **captured / fused** | captured + Inductor / fused "
    "| reduce-overhead / fused | worst error of captured |\n" + "| --- " * 11 + "|"
)


def graphs_line(row: GraphRow) -> str:
    ms = [f"{row.ms[way]:.2f}" if way in row.ms else "–" for way in WAYS]
    ratio = [f"{row.ratio[way]:.2f}" if way in row.ratio else "–" for way in WAYS[1:]]
    ms[2], ratio[1] = f"**{ms[2]}**", f"**{ratio[1]}**"
    return f"| {' | '.join([row.case, *ms, *ratio])} | {row.error['captured']:.0e} |"
