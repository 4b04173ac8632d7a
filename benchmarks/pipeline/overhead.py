"""What does a pipeline take of the host besides its modules? All ranks in one process, without messages.

    python benchmarks/pipeline/overhead.py [--rounds N] [--json]

Eight microbatches of 2 × 64 tokens through models of d=64, where Python weighs most: a GPT of eight blocks, on two
ranks, and, if transformers is installed, an unmodified Llama of sixteen layers, on four. A stage runs the whole model's
own forward, and of its modules those of its part, so what it costs besides grows with the model. Times are the thread's
own, in turns with the same microbatches without a pipeline.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from models import gpt

from sternway.pipeline import LocalTransport, Pipeline

SCHEDULES = "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"
MICROBATCHES, ROWS, LENGTH, WARM_UP = 8, 2, 64, 3


def of_gpt(rounds: int) -> dict[str, Any]:
    x, target = torch.randn(2, MICROBATCHES * ROWS, LENGTH, 64)
    model = gpt(64, 8)

    def alone() -> None:
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(model(part), goal) / MICROBATCHES).backward()

    return timed(alone, model, rounds, 2, lambda pipe: pipe.step(x, target=target), loss_fn=F.mse_loss)


def of_llama(rounds: int) -> dict[str, Any] | None:
    try:
        import zoo.libraries  # noqa: F401, I001  # before transformers: torchvision beside a CPU build of torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    ids = torch.randint(512, (MICROBATCHES * ROWS, LENGTH))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))

    def alone() -> None:
        for part in ids.chunk(MICROBATCHES):
            (model(input_ids=part, labels=part).loss / MICROBATCHES).backward()

    return timed(alone, model, rounds, 4, lambda pipe: pipe.step(input_ids=ids, labels=ids))


def timed(
    alone: Callable[[], None],
    model: nn.Module,
    rounds: int,
    ranks: int,
    step: Callable[[Pipeline], Any],
    **options: Any,
) -> dict[str, Any]:
    """The time of a step of each schedule over that without a pipeline, and how long that takes."""
    with ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {"alone": alone}
        for name in SCHEDULES:
            pipe = Pipeline(
                copy.deepcopy(model), schedule=name, n_microbatches=MICROBATCHES, ranks=ranks,
                transport=LocalTransport(), **options,
            )  # fmt: skip
            stack.enter_context(closing(pipe))
            calls[name] = lambda pipe=pipe: step(pipe)
        for call in list(calls.values()) * WARM_UP:
            call()
        gc.collect()
        gc.disable()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.thread_time()
                call()
                times[name].append(time.thread_time() - start)
        gc.enable()
    ratios = {
        name: statistics.median(each / one for each, one in zip(times[name], times["alone"], strict=True))
        for name in SCHEDULES
    }
    return {"alone_ms": 1e3 * statistics.median(times["alone"]), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {"GPT, 2 ranks": of_gpt(arguments.rounds), "Llama, 4 ranks": of_llama(arguments.rounds)}
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "rows": found}))
        return
    print(f"torch {torch.__version__}, one thread, {arguments.rounds} rounds\n")
    print("| over the model alone | alone, ms |", " | ".join(SCHEDULES), "|")
    print("| --- " * (2 + len(SCHEDULES)) + "|")
    for name, row in found.items():
        if row is not None:
            print(f"| {name} | {row['alone_ms']:.1f} |", " | ".join(f"{x:.2f}" for x in row["ratios"].values()), "|")


if __name__ == "__main__":
    main()
