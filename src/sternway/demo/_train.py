"""Start the processes of the demo, and follow them until rank 0 has a result."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not exported to mypy

from sternway.errors import PipelineError

TOLERANCE = 1e-3  # relative, between the pipeline's gradients and one process's

Progress: TypeAlias = Callable[[int, int | None, str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How large the demo is."""

    ranks: int = 2
    schedule: str = "auto"
    steps: int = 40  # of which "auto" takes some thirty to try plans
    microbatches: int = 8
    rows: int = 2  # in a microbatch
    length: int = 64
    dim: int = 256
    layers: int = 8
    compared_steps: int = 6
    device: str = "cpu"  # or "cuda"; see ``choose_device``


@dataclass(slots=True)
class DemoOutcome:
    """What rank 0 reports at the end; times in seconds, memory in bytes."""

    losses: list[float] = field(default_factory=list)
    gradient_error: float = 0.0
    one_process: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    planned_bubble: float = 0.0
    measured_bubble: float = 0.0
    schedule_name: str = ""
    planned: Any = None  # Timelines
    measured: Any = None
    profile: Any = None  # what was measured of each stage

    @property
    def gradients_equal(self) -> bool:
        """Whether the first step's gradients were those of one process."""
        return self.gradient_error < TOLERANCE

    def efficiency(self, ranks: int) -> dict[str, float]:
        """For each way to run a step, one process's time over the time of all ranks together."""
        return {name: self.one_process / (ranks * seconds) for name, seconds in self.seconds.items()}


def train(options: DemoOptions, progress: Progress = lambda done, total, text: None) -> DemoOutcome:
    """Train across ``options.ranks`` local processes, then time a step beside one process and torch's schedules.

    Args:
        options: the size of the model, the data and the pipeline.
        progress: called with how much is done, of how much (None while that is not known), and what goes on.

    Raises:
        PipelineError: a process failed.
    """
    from sternway.demo._rank import run

    on_gpu = options.device == "cuda"  # which cannot be used after a fork if it was asked for before
    context: Any = torch.multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    if not on_gpu:
        context.set_forkserver_preload([run.__module__])  # torch is imported once, not by every process
    reports = context.SimpleQueue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port, held from here on
    processes = [
        context.Process(target=run, args=(rank, store.port, options, reports), daemon=True)
        for rank in range(options.ranks)
    ]
    patience = 0.0
    try:
        with _no_interrupts():  # one that waits is raised at its end, where processes are there to be ended
            for process in processes:
                process.start()
        while True:
            kind, *values = _next_report(reports, processes)
            if kind == "done":
                outcome: DemoOutcome = values[0]
                patience = 10.0
                return outcome
            if kind == "error":
                error = PipelineError("a process of the demo failed", got=values[0], fix="pass --debug to see where")
                error.add_note(values[1])
                raise error
            progress(*values)
    finally:
        processes = [process for process in processes if process.pid is not None]
        for process in processes if patience == 0 else []:  # all of them before one sees that another is gone
            process.kill()
        for process in processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A block in which processes are started that Ctrl-C does not reach: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next_report(reports: Any, processes: list[Any]) -> tuple[Any, ...]:
    while reports.empty():
        if all(not process.is_alive() for process in processes) and reports.empty():  # nothing came since, either
            raise PipelineError("all processes of the demo ended without a result", fix="see what they printed")
        processes[0].join(timeout=0.05)
    report: tuple[Any, ...] = reports.get()
    return report
