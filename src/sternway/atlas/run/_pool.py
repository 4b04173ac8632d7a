"""Run jobs in worker processes, or in this process if there are few."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from sternway.atlas.run._work import Done, Job, run, start
from sternway.errors import AtlasError

Progress = Callable[[str, int, int], None]


class JobPool:
    """Worker processes, started when first needed and kept until the end of the run."""

    def __init__(self, jobs: int | None, progress: Progress | None) -> None:
        self._count = max(1, jobs if jobs is not None else os.cpu_count() or 1)
        self._progress = progress or (lambda phase, done, total: None)
        self._executor: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> JobPool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, phase: str, jobs: Sequence[Job], *, small: bool) -> Iterator[Done]:
        """Each job's result as it comes; the first failure is raised."""
        if not jobs:
            return
        self._progress(phase, 0, len(jobs))
        results = map(_here, jobs) if small or self._count == 1 else self._spread(jobs)
        for number, done in enumerate(results, 1):
            self._progress(phase, number, len(jobs))
            yield done

    def _spread(self, jobs: Sequence[Job]) -> Iterator[Done]:
        if self._executor is None:
            spawn = multiprocessing.get_context("spawn")  # the caller may have threads, which fork does not copy
            self._executor = concurrent.futures.ProcessPoolExecutor(self._count, spawn, initializer=start)
        waiting = [self._executor.submit(run, job) for job in jobs]
        try:
            for future in concurrent.futures.as_completed(waiting):
                yield future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise AtlasError(
                "a worker process was lost",
                got="one that ended early: out of memory, killed, or started by a script without a main guard",
                fix="use fewer jobs, include fewer files, and call build() under `if __name__ == '__main__'`",
            ) from None


def _here(job: Job) -> Done:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        return run(job)
    finally:
        sys.setrecursionlimit(limit)
