"""What a step costs when saved tensors are kept, offloaded and encoded: time, peak memory, bytes moved, error.

    python benchmarks/saved/main.py [--device cpu|cuda] [--rounds N] [--only WORD] [--directory DIR]

Prints one JSON object a line, as soon as it is known. On CUDA: 16 GPT blocks, d=4096, bfloat16, batch 2 × 4096; keeping
beside torch's ``save_on_cpu(pin_memory=True)`` and ours. On the CPU: 4 GPT blocks, d=256, with the disk as the place to
move to; the codecs' bytes, errors and times; and the demo's GPT trained for 300 steps with and without int8.

A step is a forward and a backward, gradients accumulating. Times are medians over the rounds, after steps that warm
up; on the CPU each round times a step that keeps too, and ratios are medians of the rounds' own. *Peak* is the most
that was allocated during a step above what was allocated before it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import gpt

from sternway import saved
from sternway.demo import GPT, batches, standard_library
from sternway.saved import Offload, Policy

GB = 1e9


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


class Steps:
    """The same step, under one policy or another."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.cuda = x.is_cuda
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def once(self, policy: AbstractContextManager[Any]) -> tuple[float, int, Any]:
        """Seconds, peak bytes above the start (CUDA), and the report."""
        self._sync()
        before = self._reset_peak()
        start = time.perf_counter()
        with policy as report:
            loss = self.model(self.x).sum()
        loss.backward()
        self._sync()
        seconds = time.perf_counter() - start
        return seconds, (torch.cuda.max_memory_allocated() - before) if self.cuda else 0, report

    def measure(
        self, make: Callable[[], AbstractContextManager[Any]], warm: int, rounds: int, again: bool = False
    ) -> tuple[float, int, Any]:
        """Median seconds, largest peak and last report; ``again``: a policy that can be entered only once."""
        policy = make()
        for _ in range(warm):
            self.once(make() if again else policy)
        found = [self.once(make() if again else policy) for _ in range(rounds)]
        return statistics.median(f[0] for f in found), max(f[1] for f in found), found[-1][2]

    def grads(self, policy: AbstractContextManager[Any]) -> list[Tensor]:
        self.model.zero_grad()
        self.once(policy)
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _reset_peak(self) -> int:
        if not self.cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


@contextlib.contextmanager
def weights_sent(policy: Offload, parameters: set[int]) -> Iterator[list[int]]:
    """Count, at the door of the store, bytes that belong to a parameter."""
    sent: list[int] = [0]
    send = policy.offloader.store.send

    def counted(flat: Tensor, itemsize: int, lossless: bool) -> Any:
        sent[0] += flat.numel() if flat.untyped_storage().data_ptr() in parameters else 0
        return send(flat, itemsize, lossless)

    policy.offloader.store.send = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        policy.offloader.store.send = send  # type: ignore[method-assign]


def relative_error(grads: list[Tensor], reference: list[Tensor]) -> float:
    return max(
        float((g.float() - r.float()).norm() / r.float().norm().clamp_min(1e-12))
        for g, r in zip(grads, reference, strict=True)
    )


# CUDA


def cuda(rounds: int, only: str, dim: int, layers: int, length: int, device: str = "cuda") -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = gpt(dim, layers, heads=dim // 128)
        x = torch.randn(2, length, dim)
    torch.set_default_dtype(torch.float32)
    steps = Steps(model, x)
    say(
        what="environment",
        torch=torch.__version__,
        device=torch.cuda.get_device_name(),
        python=platform.python_version(),
        case=f"{layers} GPT blocks, d={dim}, batch 2 x {length}, bfloat16",
    )
    keep_s, keep_peak, _ = steps.measure(contextlib.nullcontext, warm=2, rounds=rounds)
    say(what="keep", ms=1000 * keep_s, peak_gb=keep_peak / GB, total_gb=torch.cuda.max_memory_allocated() / GB)
    ways: dict[str, Callable[[], Offload]] = {
        "auto": lambda: saved.offload(budget="auto"),
        "everything": lambda: saved.offload(budget=0),
    }
    for name, make in ways.items():
        if only in name:
            way(name, make(), steps, keep_s, keep_peak, rounds)
            gc.collect()
    if only in "save_on_cpu":
        found_s, peak, _ = steps.measure(
            lambda: torch.autograd.graph.save_on_cpu(pin_memory=True), warm=1, rounds=2, again=True
        )
        say(what="torch save_on_cpu", ms=1000 * found_s, over_keep=found_s / keep_s, peak_gb=peak / GB)
    if only in "gradients":
        model.zero_grad()
        steps.once(contextlib.nullcontext())
        once = [p.grad.clone() for p in list(model.parameters())[:24] if p.grad is not None]
        model.zero_grad()
        steps.once(saved.offload(budget=0))
        ours = [p.grad for p in list(model.parameters())[:24] if p.grad is not None]
        say(what="gradients", relative_error=relative_error(ours, once), of=len(once))
    for codec in ("int8", "fp8"):
        if only in codec:
            encoding = saved.compress(codec)
            found_s, peak, report = steps.measure(lambda: encoding, warm=1, rounds=2)  # noqa: B023
            say(
                what=f"ours, {codec} on the device",
                ms=1000 * found_s,
                over_keep=found_s / keep_s,
                peak_gb=peak / GB,
                peak_saved=1 - peak / keep_peak,
                ratio=report.ratio,
            )
    if only in "half":
        way("half", saved.offload(budget=0.5), steps, keep_s, keep_peak, rounds)


def way(name: str, policy: Offload, steps: Steps, keep_s: float, keep_peak: int, rounds: int) -> None:
    """One way to offload, beside keeping and beside the link's own time for the same bytes."""
    with weights_sent(policy, steps.parameters) as sent:
        found_s, peak, report = steps.measure(lambda: policy, warm=4 if name == "auto" else 2, rounds=rounds)
    out, back = policy.offloader.store.rates(steps.x.device)
    moved, plan = report.moved_bytes, policy.offloader.plan
    link = moved / out + moved / back
    say(
        what=f"ours, {name}",
        ms=1000 * found_s,
        over_keep=found_s / keep_s,
        peak_gb=peak / GB,
        peak_saved=1 - peak / keep_peak,
        moved_gb=moved / GB,
        packed_gb=(report.packed_bytes - report.skipped.get("parameter", 0)) / GB,
        again_gb=report.deduplicated_bytes / GB,
        weights_moved_bytes=sent[0],
        stall_ms=1000 * report.stall_seconds,
        held_peak_gb=report.peak_bytes / GB,
        link_out_gbs=out / GB,
        link_back_gbs=back / GB,
        link_ms=1000 * link,
        over_link=found_s / link if link else None,
        predicted_peak_gb=plan.predicted_peak / GB if plan else None,
        predicted_stall_ms=1000 * plan.predicted_stall if plan else None,
        skipped={reason: size / GB for reason, size in report.skipped.items()},
    )


# CPU


def beside_keeping(steps: Steps, policy: Policy, warm: int, rounds: int) -> tuple[float, float, Any]:
    """Median milliseconds, median ratio to a step that keeps, taken in turn, and the last report."""
    for _ in range(warm):
        steps.once(policy)
    times, ratios = [], []
    for _ in range(rounds):
        keep, _, _ = steps.once(contextlib.nullcontext())
        seconds, _, report = steps.once(policy)
        times.append(1000 * seconds)
        ratios.append(seconds / keep)
    return statistics.median(times), statistics.median(ratios), report


def cpu(rounds: int, only: str, directory: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps = Steps(gpt(256, 4), torch.randn(4, 128, 256))
    say(what="environment", torch=torch.__version__, machine=platform.machine(), python=platform.python_version())
    reference = steps.grads(contextlib.nullcontext())
    for budget in (0, 0.5, "auto"):
        if only in (name := f"disk, budget {budget}"):
            policy = saved.offload(
                to="disk", directory=directory, min_bytes="64KiB", budget=budget, buffer="4MiB", prefetch="4MiB"
            )
            ms, ratio, report = beside_keeping(steps, policy, 3, rounds)
            say(
                what=name,
                ms=ms,
                over_keep=ratio,
                packed_mb=(report.packed_bytes - report.skipped.get("parameter", 0)) / 1e6,
                moved_mb=report.moved_bytes / 1e6,
                held_peak_mb=report.peak_bytes / 1e6,
                stall_ms=1000 * report.stall_seconds,
                relative_error=relative_error(steps.grads(policy), reference),
            )
    if only in "disk, lossless":
        policy = saved.offload(to="disk", directory=directory, min_bytes="64KiB", buffer="4MiB", prefetch="4MiB")
        with saved.compress("lossless"):
            steps.once(policy)
        store: Any = policy.offloader.store
        store.written_bytes = 0
        with saved.compress("lossless"):
            seconds, _, _ = steps.once(policy)
            written = store.written_bytes
            error = relative_error(steps.grads(policy), reference)
        say(what="disk, lossless", ms=1000 * seconds, written_mb=written / 1e6, relative_error=error)
    for codec in ("bf16", "int8", "fp8"):
        if only in codec:
            encoding = saved.compress(codec)
            ms, ratio, report = beside_keeping(steps, encoding, 1, rounds)
            say(
                what=codec,
                ms=ms,
                over_keep=ratio,
                ratio=report.ratio,
                from_mb=report.total.encoded_from / 1e6,
                to_mb=report.total.encoded_to / 1e6,
                relative_error=relative_error(steps.grads(encoding), reference),
            )
    if only in "training":
        training()


def training(count: int = 300, average: int = 20) -> None:
    """The demo's GPT: the mean loss over the last steps, with and without int8."""
    text = standard_library()
    ends = {}
    for name in ("keep", "int8", "fp8"):
        torch.manual_seed(0)
        model = GPT(vocabulary=256, dim=64, heads=4, layers=4, length=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        policy = contextlib.nullcontext() if name == "keep" else saved.compress(name)
        losses = []
        for (tokens, target), _ in zip(batches(text, 16, 64), range(count), strict=False):
            with policy:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends[name] = statistics.mean(losses[-average:])
        say(what=f"training, {name}", steps=count, loss=ends[name], over_keep=ends[name] / ends["keep"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--directory", default=None, help="for the disk; a temporary one unless given")
    parser.add_argument("--dim", type=int, default=4096, help="on CUDA")
    parser.add_argument("--layers", type=int, default=16, help="on CUDA")
    parser.add_argument("--length", type=int, default=4096, help="on CUDA")
    options = parser.parse_args()
    if options.device == "cuda":
        cuda(options.rounds or 3, options.only, options.dim, options.layers, options.length)
        return
    with tempfile.TemporaryDirectory() as folder:
        cpu(options.rounds or 7, options.only, options.directory or folder)


if __name__ == "__main__":
    main()
