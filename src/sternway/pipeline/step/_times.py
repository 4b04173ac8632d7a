"""When did the actions of a rank run? On a CPU the host knows; on a GPU, which runs later, events do."""

from __future__ import annotations

import time

import torch

Spans = list[tuple[float, float]]  # start and end of each action, in seconds
RankTimes = dict[int, Spans]  # of each rank of this process


class StreamClock:
    """Puts events of a GPU on the clock of the host, given one event of which both times are known.

    That event is the last one that the host waited for. If the GPU was faster than the host, it stays an older one: how
    long ago an event was that is over, the host cannot know.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait(self.now())

    def now(self) -> torch.cuda.Event:
        """The end of all work so far, as an event. Does not wait."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, events: list[torch.cuda.Event]) -> list[float]:
        """The times of events of one stream, in order, on the clock of the host. Waits for the last of them."""
        if not events:
            return []
        if not events[-1].query():  # type: ignore[no-untyped-call]  # torch's
            self._wait(events[-1])
            return [self._host - event.elapsed_time(self._known) / 1e3 for event in events]
        return [self._host + self._known.elapsed_time(event) / 1e3 for event in events]

    def _wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()
        self._known, self._host = event, time.perf_counter()


class StreamTimes:
    """The starts and ends of a rank's actions on a GPU. To note one does not wait for the GPU."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._events: list[torch.cuda.Event] = []

    def mark(self, twice: bool = False) -> None:
        """Note a start, or an end; or both at once, of what goes on beside the stream."""
        self._events += [self._clock.now()] * (2 if twice else 1)

    def read(self) -> Spans:
        """All spans, on the clock of the host. Waits until the GPU has come to the last of them."""
        times = self._clock.read(self._events)
        return list(zip(times[::2], times[1::2], strict=True))
