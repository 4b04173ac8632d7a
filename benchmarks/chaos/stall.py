"""How long does a save hold training up, and how long does it take?

    python benchmarks/chaos/stall.py [--dim 256] [--layers 8] [--saves 6]

One process, all stages in it: what a rank with such a model does. Three ways: a save that is waited for, one in the
background, and torch.save of the same state, for scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import gpt
from torch.nn import functional as F

from sternway.pipeline import LocalTransport, Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pipe = Pipeline(
        gpt(arguments.dim, arguments.layers),
        schedule="1f1b",
        n_microbatches=2,
        ranks=2,
        loss_fn=F.mse_loss,
        transport=LocalTransport(),
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    x, target = torch.randn(4, 32, arguments.dim), torch.randn(4, 32, arguments.dim)

    def step() -> float:
        start = time.perf_counter()
        pipe.step(x, target=target, record=False)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    times: dict[str, list[float]] = {"step": [], "waited": [], "stalled": [], "written": [], "torch.save": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.saves + 1):  # the first one makes the buffers
            times["step"].append(step())
            times["waited"].append(pipe.save(folder, optimizer, 2 * number, keep=1).stall_seconds)
            times["step"].append(step())
            start = time.perf_counter()
            saving = pipe.save(folder, optimizer, 2 * number + 1, keep=1, wait=False)
            times["stalled"].append(saving.stall_seconds)
            saving.wait()
            times["written"].append(time.perf_counter() - start)
            start = time.perf_counter()
            torch.save([pipe.state_dict(), optimizer.state_dict()], Path(folder) / "plain.pt")
            times["torch.save"].append(time.perf_counter() - start)
    size = sum(p.nbytes for p in pipe.parameters()) * 3
    medians = {name: round(1e3 * statistics.median(values[1:]), 1) for name, values in times.items()}
    print(json.dumps({"megabytes": round(size / 1e6), "median_ms": medians, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
