"""A step that does not end on the GPU is noticed, with ends and a clock of our own."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from sternway.pipeline.faults._stream_watch import StreamWatch
from sternway.pipeline.faults._watch import Watch

LIMIT = 60.0  # only ends a test that hangs


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class End:
    """The end of a step, which comes when it is told to, and perhaps with an error."""

    def __init__(self, error: str = "") -> None:
        self.waited_for, self.come, self.error = threading.Event(), threading.Event(), error

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.come.wait(LIMIT)
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_step_that_the_host_posts_counts(clock: Clock) -> None:
    watch = StreamWatch(pytest.fail, clock)
    assert watch.waits() == 0
    watch.begin()
    clock.now += 5
    watch.begin()  # the next message of the same step
    assert watch.waits() == 5
    watch.stop()
    assert watch.waits() == 0


def test_a_step_begins_when_the_one_before_has_ended(clock: Clock) -> None:
    watch, first, second = StreamWatch(pytest.fail, clock), End(), End()
    for end in (first, second):  # the host is two steps ahead
        watch.begin()
        watch.end(end)
    assert first.waited_for.wait(LIMIT)
    clock.now += 7
    assert watch.waits() == 7
    first.come.set()
    assert second.waited_for.wait(LIMIT)
    assert watch.waits() == 0
    clock.now += 2
    assert watch.waits() == 2
    second.come.set()
    watch.stop()
    watch._thread.join(LIMIT)
    assert watch.waits() == 0


def test_a_gpu_that_fails_is_told_of(clock: Clock) -> None:
    told: list[str] = []
    watch, end = StreamWatch(told.append, clock), End("device-side assert triggered\nmore about it")
    watch.end(end)
    end.come.set()
    watch._thread.join(LIMIT)
    assert not watch._thread.is_alive()
    assert told == ["device-side assert triggered"]
    assert watch.waits() == 0


def test_the_watch_over_the_ranks_gives_up_after_a_while() -> None:
    woken = threading.Event()
    watch = Watch(dist.HashStore(), "here", 0, 2, 600, 30, "global rank 0", True, woken.set)
    watch.follow(waits=lambda: 29.0)
    assert watch.lost is None
    watch.follow(waits=lambda: 31.0)
    assert woken.wait(LIMIT)
    assert watch.lost.what == "the GPU of rank 0 has been in one step for 31 s, though all ranks are alive"
    watch.stop()
