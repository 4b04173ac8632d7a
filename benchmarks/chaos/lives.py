"""A training run that is killed again and again: one life after another, each going on from the last checkpoint.

The processes of a life are forked from a warm one, so that a life costs seconds, not torch's imports times four.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from chaos.fault import Fault, Injector
from torch.nn import functional as F

from sternway.demo import GPT
from sternway.errors import SternwayError
from sternway.pipeline import Pipeline
from sternway.pipeline.checkpoint import _files as files

VOCABULARY, LENGTH, MICROBATCHES = 17, 8, 4


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: what it computes does not depend on how often it dies."""

    directory: Path
    steps: int
    ranks: int = 4
    schedule: str = "zb-h1"
    save_every: int = 2
    heartbeat_timeout: float = 4.0


@dataclass(slots=True)
class Life:
    """How one life ended."""

    weights: str = ""  # of all ranks, once it is done
    resumed: int = 0
    saved: int = -1  # the last step that was reported as saved
    died: float | None = None
    reports: dict[int, tuple[float, str]] = field(default_factory=dict)  # by rank: when, what
    hung: list[int] = field(default_factory=list)

    @property
    def seconds_to_report(self) -> float | None:
        """From the fault to the last rank's report."""
        times = [when for when, _ in self.reports.values()]
        return max(times) - self.died if self.died is not None and times else None


def context() -> Any:
    """Where processes are forked from."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "sternway.pipeline", "chaos.lives"])
    return found


def live(run: Run, fault: Fault | None, limit: float = 60.0) -> Life:
    """Run all ranks until they are done or have reported a fault; whoever does neither within ``limit`` hangs."""
    life = Life()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = {}, []
    for rank in range(run.ranks):
        mine, theirs = mp.Pipe(duplex=False)
        process = context().Process(target=work, args=(rank, port, run, fault, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[mine] = rank
        processes.append(process)
    digests: dict[int, str] = {}
    end = time.monotonic() + limit
    while pipes and time.monotonic() < end:
        for pipe in wait(list(pipes), timeout=0.2):
            rank = pipes[pipe]
            try:
                kind, *values = pipe.recv()
            except EOFError:
                del pipes[pipe]
                continue
            if kind == "resumed":
                life.resumed = values[0]
            elif kind == "saved":
                life.saved = max(life.saved, values[0])
                end = max(end, time.monotonic() + limit)
            elif kind == "dies":
                life.died = values[0]
                end = time.monotonic() + limit
                if fault is not None and fault.kind == "SIGSTOP":
                    del pipes[pipe]  # it will say no more
            elif kind == "reported":
                life.reports[rank] = tuple(values)
            elif kind == "done":
                digests[rank] = values[0]
    life.hung = sorted(pipes.values())
    for process in processes:
        process.kill()
        process.join()
    if len(digests) == run.ranks:
        life.weights = hashlib.sha256("".join(digests[rank] for rank in range(run.ranks)).encode()).hexdigest()
    return life


def newest(directory: Path) -> int:
    """The step of the newest whole checkpoint; -1 if there is none."""
    for path in files.candidates(directory):
        try:
            files.verify(path, files.read_manifest(path))
            return files.step_of(path) or 0
        except SternwayError:
            continue
    return -1


def work(rank: int, port: int, run: Run, fault: Fault | None, said: Connection) -> None:
    """One rank of one life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("STERNWAY_REPORTS", str(run.directory / "reports"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is gone is what is tested here
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=run.ranks)
        said.send(("done", _train(rank, run, fault, said)))
    except BaseException as error:
        said.send(("reported", time.monotonic(), f"{type(error).__name__}: {error}"))
    said.close()
    os._exit(0)


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _train(rank: int, run: Run, fault: Fault | None, said: Connection) -> str:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, dim=16, heads=2, layers=max(4, run.ranks), length=LENGTH)
    pipe = Pipeline(
        model, schedule=run.schedule, n_microbatches=MICROBATCHES, loss_fn=loss, heartbeat_timeout=run.heartbeat_timeout
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    found = pipe.resume(run.directory, optimizer, scheduler=scheduler)
    first = 0 if found is None else found.step
    injector = Injector(fault, pipe, lambda when: said.send(("dies", when))) if fault and fault.rank == rank else None
    if rank == 0:
        said.send(("resumed", first))
    saving = None
    for step in range(first, run.steps):
        if injector is not None:
            injector.begin(step)
        tokens = torch.randint(0, VOCABULARY, (2 * MICROBATCHES, LENGTH))  # from the generator that is saved
        pipe.step(tokens, target=tokens, record=False)
        if injector is not None:
            injector.at("before the optimizer")
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if injector is not None:
            injector.at("after the optimizer")
        if (step + 1) % run.save_every == 0:
            if saving is not None:
                saving.wait()
                if rank == 0:
                    said.send(("saved", step + 1 - run.save_every))
            saving = pipe.save(run.directory, optimizer, step + 1, scheduler=scheduler, keep=3, wait=False)
    if saving is not None:
        saving.wait()
    digest = hashlib.sha256()
    for name, tensor in sorted(pipe.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    pipe.close()
    return digest.hexdigest()
