"""Thousands of steps on two processes: do memory, file descriptors or threads grow?

    python benchmarks/chaos/soak.py [--steps 2000] [--json]

Each step trains, steps an optimizer on trial and, now and then, saves in the background. What the kernel says of each
process is read every 100 steps; the first fifth of the run is left for everything to be set up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chaos.lives import LENGTH, MICROBATCHES, VOCABULARY, context, loss

from sternway.demo import GPT
from sternway.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Use:
    """What a process holds."""

    step: int
    resident: int  # bytes
    descriptors: int
    threads: int
    tensors: int  # that Python can reach

    @staticmethod
    def now(step: int) -> Use:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        status = Path("/proc/self/status").read_text()
        threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
        gc.collect()
        tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        return Use(step, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threads, tensors)


def work(rank: int, port: int, folder: str, steps: int, every: int, said: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, dim=16, heads=2, layers=4, length=LENGTH)
    pipe = Pipeline(model, schedule="zb-h1", n_microbatches=MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    uses, saving = [], None
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (2 * MICROBATCHES, LENGTH))
        pipe.step(tokens, target=tokens, loss_everywhere=True)
        pipe.optimizer_step(optimizer, max_norm=10.0)
        if (step + 1) % every == 0:
            if saving is not None:
                saving.wait()
            uses.append(Use.now(step + 1))
            saving = pipe.save(folder, optimizer, step + 1, keep=2, wait=False)
    pipe.close()
    said.put((rank, uses))
    dist.barrier()
    dist.destroy_process_group()


def soak(steps: int, every: int) -> dict[int, list[Use]]:
    """Run it; what each rank held, every so many steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = context().SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context().Process(target=work, args=(r, port, folder, steps, every, said)) for r in range(2)]
        for process in processes:
            process.start()
        found = dict(said.get() for _ in processes)
        for process in processes:
            process.join()
    return found


def growth(uses: list[Use]) -> dict[str, int]:
    """The last value over that after a fifth of the run."""
    first, last = uses[len(uses) // 5], uses[-1]
    return {
        name: getattr(last, name) - getattr(first, name) for name in ("resident", "descriptors", "threads", "tensors")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    found = soak(arguments.steps, every=100)
    if not arguments.json:
        print("| rank | step | resident, MiB | descriptors | threads |\n| --- | --- | --- | --- | --- |")
        for rank, uses in sorted(found.items()):
            for use in uses[:: max(1, len(uses) // 5)]:
                print(f"| {rank} | {use.step} | {use.resident / 2**20:.1f} | {use.descriptors} | {use.threads} |")
    record = {
        "steps": arguments.steps,
        "growth": {str(rank): growth(uses) for rank, uses in sorted(found.items())},
        "last": {str(rank): asdict(uses[-1]) for rank, uses in sorted(found.items())},
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
