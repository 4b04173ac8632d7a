"""Processes that train in several lives: in each, one of them ends in some way, and the others go on.

A life is a process group, a pipeline, and steps whose gradients are compared with one process's. The processes that are
left destroy the group and build a new one, with a new process in the place of the one that ended.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import free_port, join_group, processes
from small_gpus import Init, become_small_gpu
from sternway.pipeline import Pipeline

DIM, STEPS, MICROBATCHES = 32, 6, 4

Way = Literal["raise", "SIGKILL", "SIGSTOP", "gpu", "none"]
"""How a process ends: an exception, a signal, an assertion in a kernel of its GPU, or not at all."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Which process ends, how, and when: in the second microbatch of a step."""

    way: Way
    rank: int = 0
    step: int = 2
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """What a process is told: its rank, where to meet, and how the life ends."""

    rank: int
    ranks: int
    port: int
    ending: Ending
    heartbeat_timeout: float
    reports: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a process tells at the end of a life.

    Attributes:
        error: the name of the exception's class, or "none".
        text: its message, or the traceback if that was not of Sternway.
        late: how many seconds after the end of the other process this one was done with the exception.
        steps: how many steps had the right gradients.
        allocated: bytes of the GPU that torch has allocated after the life.
        watchdogs: how many threads of torch's watch over the communicators of the pipeline.
    """

    error: str
    text: str
    late: float
    steps: int
    allocated: int = 0
    watchdogs: int = 0


class Mortal(nn.Module):
    """A stage that ends its process."""

    def __init__(self, ending: Ending | None, when: Any) -> None:
        super().__init__()
        self.layer, self.calls, self.ending, self.when = nn.Linear(DIM, DIM), 0, ending, when

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).relu()
        if self.ending is not None and self.calls == self.ending.step * MICROBATCHES + 1:
            if self.ending.backward:
                y.register_hook(lambda grad: self.end(grad))
            else:
                self.end(y)
        self.calls += 1
        return y

    def end(self, tensor: Tensor) -> None:
        assert self.ending is not None
        self.when.value = time.time()
        way = self.ending.way
        if way == "raise":
            raise ValueError("no luck")
        if way == "gpu":
            tensor.flatten()[torch.tensor([tensor.numel()], device=tensor.device)].sum()
        elif way != "none":
            os.kill(os.getpid(), getattr(signal, way))


class Workers:
    """So many processes, on the CPU or on small GPUs of one, until ``close``."""

    def __init__(self, ranks: int, device: str, init: Init = "lazy") -> None:
        self.ranks = ranks
        self._device, self._init, self._context = device, init, processes()
        self._when = self._context.Value("d", 0.0)
        self._workers = [self._start() for _ in range(ranks)]

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._when, self._device, self._init))
        process.start()
        theirs.close()
        return process, ours

    def live(self, ending: Ending, heartbeat_timeout: float, reports: Path, limit: float) -> dict[int, Told]:
        """Let all processes live once, and replace the one that ended; what the others tell, and it, if it can.

        A process that does not tell anything within ``limit`` seconds is an error.
        """
        port = free_port()
        for rank, (_, connection) in enumerate(self._workers):
            connection.send(Life(rank, self.ranks, port, ending, heartbeat_timeout, str(reports)))
        found = {}
        silent = {ending.rank} if ending.way.startswith("SIG") else set()
        end = time.monotonic() + limit
        for rank, (process, connection) in enumerate(self._workers):
            if rank in silent:
                continue
            if not connection.poll(max(0.0, end - time.monotonic())):
                self._show_threads()
                raise AssertionError(f"rank {rank} hangs after {ending}; others told {found}")
            try:
                found[rank] = connection.recv()
            except EOFError:
                process.join()
                found[rank] = Told("died", f"exit code {process.exitcode}", 0.0, 0)
        if ending.way in ("SIGKILL", "SIGSTOP", "gpu"):
            self._kill(ending.rank)
            self._workers[ending.rank] = self._start()
        return found

    def _show_threads(self) -> None:
        """Have every process write where its threads are."""
        for process, _ in self._workers:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)

    def _kill(self, rank: int) -> None:
        process, connection = self._workers[rank]
        process.kill()
        process.join()
        connection.close()

    def close(self) -> None:
        for rank in range(self.ranks):
            self._kill(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _work(connection: Any, when: Any, device: str, init: Init) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            life = connection.recv()
        except EOFError:
            return
        told = _live(life, when, device, init)
        text = told.text if told.steps < life.ending.step else told.text.partition("\n")[0]
        what = f"{told.error} after {told.late:.1f} s and {told.steps} steps: {text}"
        sys.stderr.write(f"[rank {life.rank} of {life.ending}] {what}\n")
        sys.stderr.flush()
        connection.send(told)


def _live(life: Life, when: Any, device: str, init: Init) -> Told:
    error, text, steps, watchdogs = "none", "", [0], [0]
    try:
        if device == "cuda":  # no MPS, which does not survive a client's death
            become_small_gpu(life.rank, life.ranks, life.port, init, {}, timeout=10_000)
        else:
            join_group(life.rank, life.ranks, life.port)
        _train(life, when, device, steps, watchdogs)
    except Exception as raised:
        error, text = type(raised).__name__, f"{raised}\n{traceback.format_exc()}"
    late = time.time() - when.value
    gc.collect()
    allocated = 0
    try:
        if device == "cuda":
            torch.cuda.synchronize()  # nothing is left on the GPU that waits for the one that ended
            allocated = torch.cuda.memory_allocated()
        dist.destroy_process_group()
    except Exception as raised:
        error, text = f"{error}, then {type(raised).__name__}", f"{text}\n{raised}"
    return Told(error, text, late, steps[0], allocated, watchdogs[0])


def _train(life: Life, when: Any, device: str, steps: list[int], watchdogs: list[int]) -> None:
    torch.manual_seed(0)
    stages = [Mortal(life.ending if rank == life.ending.rank else None, when) for rank in range(life.ranks)]
    reference = nn.Sequential(*(_plain(stage) for stage in stages)).to(device)
    mine = stages[life.rank].to(device)
    before = _watchdogs()
    pipe = Pipeline(
        {life.rank: mine},
        schedule="zb-h1",
        n_microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        heartbeat_timeout=life.heartbeat_timeout,
        reports=life.reports,
    )
    watchdogs[0] = _watchdogs() - before
    for _ in range(STEPS):
        x, target = torch.randn(2, 2 * MICROBATCHES, DIM).to(device)
        pipe.step(x, target=target, record=False)
        if device == "cuda":
            torch.cuda.synchronize()
        F.mse_loss(reference(x), target).backward()
        if pipe.transport.watch is not None and pipe.transport.watch.lost is None:  # else it may be garbage
            assert_same_grads(mine.layer, reference[life.rank][0], rtol=2e-3, atol=5e-5)
            steps[0] += 1
    pipe.close()


def _plain(stage: Mortal) -> nn.Module:
    """The same without an end."""
    return nn.Sequential(copy.deepcopy(stage.layer), nn.ReLU())


def _watchdogs() -> int:
    """How many threads of this process are torch's, to watch over communicators."""
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("pt_nccl") for name in names)
