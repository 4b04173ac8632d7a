"""What ranks learn of each other without a wait: a thread does the talking, and whoever wants to know looks later.

A rank hands in a way to get its numbers, and goes on. Its thread gets them, which on a GPU means to wait until the GPU
has come so far, and gathers those of all ranks over a process group of its own. What the first rank has to say goes the
same way. All ranks hand in the same things in the same order.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sternway._torch.memory import is_without_memory
from sternway.pipeline.transport._groups import in_order

Rows = list[list[float]]
T = TypeVar("T")


class LateTalk:
    """The thread of one rank.

    Args:
        group: a process group that nothing else uses.
        members: its global ranks; the first is the one that is heard.
        explain: turns a lost connection into an error that says which rank was lost.
    """

    def __init__(self, group: Any, members: Sequence[int], explain: Callable[[Exception], Exception]) -> None:
        self._group, self._members, self._explain = group, members, explain
        self._is_abandoned = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sternway-gather", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside gloo when Python ends would crash the process

    def gather(self, numbers: Callable[[], list[float]]) -> Callable[[], Rows]:
        """Hand in a row of numbers, which the thread gets by calling ``numbers``.

        Returns:
            A function that waits for the rows of all ranks, and returns them.
        """
        return self._submit(lambda: self._gather(numbers()))

    def hear(self, said: bytes) -> Callable[[], bytes]:
        """Hand in what the first rank has to say; of the others it does not count.

        Returns:
            A function that waits for it, and returns it.
        """
        return self._submit(lambda: self._hear(said))

    def _submit(self, job: Callable[[], T]) -> Callable[[], T]:
        found: Future[T] = Future()
        self._jobs.put((job, found))
        return found.result

    def abandon(self) -> None:
        """Nobody will hand in more, and nobody closed the pipeline: let the thread end by itself."""
        self._is_abandoned = True
        self._jobs.put(None)  # no lock: the collector may call this in any thread, and at any place

    def stop(self, timeout: float = 5.0) -> None:
        """Finish what was handed in, as long as the other ranks do, and end the thread."""
        atexit.unregister(self.stop)
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        failed: Exception | None = None
        while (next_job := self._jobs.get()) is not None:
            job, found = next_job
            try:
                if failed is not None:
                    raise failed
                found.set_result(job())
            except Exception as error:
                failed = failed or (self._explain(error) if isinstance(error, RuntimeError) else error)
                found.set_exception(failed)
            del next_job, job, found  # the next one may take long to come
        if self._is_abandoned:
            atexit.unregister(self.stop)

    def _gather(self, numbers: list[float]) -> Rows:
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in self._members]
        dist.all_gather(rows, mine, group=self._group)
        return [row.tolist() for row in in_order(rows, self._members)]

    def _hear(self, said: bytes) -> bytes:
        length = int(self._gather([len(said)])[0][0])
        if not length:
            return b""
        message = torch.empty(length, dtype=torch.uint8)
        if dist.get_rank() == self._members[0]:
            message.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        dist.broadcast(message, src=self._members[0], group=self._group)
        return message.numpy().tobytes()


def is_here(number: Tensor) -> bool:
    """Whether the host can read a number without a wait for a GPU; not if it is only counted what the number takes."""
    return not (number.is_cuda or is_without_memory(number))


def to_host(number: Tensor) -> Callable[[], Rows]:
    """Begin to copy a number to the host; a function that waits for it, without a wait for what is done after it."""
    if not number.is_cuda:
        return lambda: [[float(number)]]
    copied = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(number.device))

    def wait() -> Rows:
        event.synchronize()
        return [[float(copied)]]

    return wait
