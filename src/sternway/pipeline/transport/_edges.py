"""One edge between two GPUs: messages one after the other, each put on both GPUs when it is made.

    sender    thread:  wait until the GPU has made it ─ post the send ─ tell the receiver
    receiver  thread:                                     hear of it ─ post the receive ─ the host goes on

An operation of NCCL that waits for its other side occupies multiprocessors, and keeps kernels that need many of them
at once from starting. So neither side posts one before the message is there: then both run only while it travels.

No rank can wait for itself. The send is posted before the receiver hears of it, so whatever the receiver puts on its
GPU behind the message comes later than the send; and an edge has one send at a time on the GPU, so none stands before
other work in one of the few queues that a GPU has for all its streams.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

import torch
from torch import Tensor

from sternway._torch.distributed import StreamWork
from sternway.pipeline.transport._payload import Spec

Post = Callable[[list[Tensor]], StreamWork]


class _EdgeThread(ABC):
    """Handles what is put, in order, with a stream of its own, until ``stop``."""

    def __init__(self, name: str, device: torch.device, post: Post) -> None:
        self._device, self._post = device, post
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Handle what was put, and nothing after it."""
        self._items.put(None)

    def join(self, timeout: float) -> None:
        """Wait for so many seconds until that is done."""
        self._thread.join(timeout)

    def _run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]  # torch's
            for item in iter(self._items.get, None):
                self._handle(item)
                del item  # it holds tensors, and the next one may take long to come

    @abstractmethod
    def _handle(self, item: Any) -> None: ...


@final
class Outgoing(_EdgeThread):
    """Sends the messages of an edge.

    Args:
        tell: begins to tell the receiver that the next message is there, and returns the work of that.
        failed: called in the thread after an error.
    """

    def __init__(
        self, name: str, device: torch.device, post: Post, tell: Callable[[], Any], failed: Callable[[], None]
    ) -> None:
        self._error: Exception | None = None
        self._tell, self._failed = tell, failed
        super().__init__(name, device, post)

    def put(self, tensors: list[Tensor]) -> None:
        """Send what the current stream makes of these tensors."""
        made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        made.record(torch.cuda.current_stream(self._device))
        self._items.put((made, tensors))

    def check(self) -> None:
        """Raise the error after which no more messages can be sent, if there was one."""
        if self._error is not None:
            raise self._error

    def _handle(self, item: tuple[torch.cuda.Event, list[Tensor]]) -> None:
        made, tensors = item
        if self._error is not None:
            return
        try:
            made.synchronize()
            work = self._post(tensors) if tensors else None
            told = self._tell()
            if work is not None:
                work.wait()
                made.record()
                made.synchronize()
            told.wait()
        except Exception as error:
            self._error = error
            self._failed()


@final
class Incoming(_EdgeThread):
    """Receives the messages of an edge.

    Args:
        hear: begins to hear from the sender that the next message is there, and returns the work of that.
    """

    def __init__(self, name: str, device: torch.device, post: Post, hear: Callable[[], Any]) -> None:
        self._hear = hear
        super().__init__(name, device, post)

    def put(self, spec: Spec) -> Future[tuple[list[Tensor], StreamWork | None]]:
        """Receive the next message; the future holds its tensors once their receive is posted, with its work."""
        found: Future[tuple[list[Tensor], StreamWork | None]] = Future()
        self._items.put((spec, found))
        return found

    def _handle(self, item: tuple[Spec, Future[tuple[list[Tensor], StreamWork | None]]]) -> None:
        spec, found = item
        try:
            self._hear().wait()
            tensors = [described.empty(self._device) for described in spec.tensors]
            parts = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
            found.set_result((tensors, self._post(parts) if parts else None))
        except Exception as error:
            found.set_exception(error)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes: NCCL does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
