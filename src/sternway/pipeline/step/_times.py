"""When did the actions of a rank run? On a CPU the host knows; on a GPU, which runs later, events do."""

from __future__ import annotations

import time

import torch

Spans = list[tuple[float, float]]  # start and end of each action, in seconds


class StreamTimes:
    """The starts and ends of a rank's actions on the current stream of a GPU. To note one does not wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Note a start, or an end."""
        self._events.append(self._now())

    def read(self) -> Spans:
        """All spans so far, on the clock of the host. Waits for the GPU."""
        last = self._now()
        last.synchronize()
        host = time.perf_counter()
        times = [host - event.elapsed_time(last) / 1e3 for event in self._events]
        return list(zip(times[::2], times[1::2], strict=True))

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event
