"""The threads of an edge between GPUs, without one: in which order they post and tell, and what an error does.

Streams and events are stood in for here; on real ones the edges are tested with NCCL (``test_nccl.py``).
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from sternway.pipeline.transport._edges import Incoming, Outgoing
from sternway.pipeline.transport._payload import pack

CPU = torch.device("cpu")
LIMIT = 60.0  # ends a test that hangs


class Gpu:
    """What happens, in order; ``made`` is set when the GPU has made the messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.made = threading.Event()
        self.fault: str | None = None
        gpu = self

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking  # no thread may use a core to wait

            def record(self, stream: Any = None) -> None:
                pass

            def synchronize(self) -> None:
                assert gpu.made.wait(LIMIT)
                if gpu.fault is not None:
                    raise RuntimeError(gpu.fault)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def post(self, tensors: list[Tensor]) -> Any:
        self.log.append(f"post {sum(t.numel() for t in tensors)}")
        return self.work("sent")

    def work(self, word: str) -> Any:
        gpu = self

        class Work:
            def wait(self) -> None:
                gpu.log.append(word)

        return Work()

    def tell(self) -> Any:
        self.log.append("tell")
        return self.work("heard")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_message_is_posted_when_it_is_made_then_told_and_one_at_a_time(gpu: Gpu) -> None:
    edge = Outgoing("edge", CPU, gpu.post, gpu.tell, lambda: gpu.log.append("failed"))
    for size in (1, 2):
        edge.put([torch.zeros(size)])
    assert gpu.log == []
    gpu.made.set()
    edge.stop()
    edge.join(LIMIT)
    assert gpu.log == ["post 1", "tell", "sent", "heard", "post 2", "tell", "sent", "heard"]
    edge.check()


def test_what_was_sent_is_not_held(gpu: Gpu) -> None:
    edge = Outgoing("edge", CPU, gpu.post, gpu.tell, lambda: None)
    tensor = torch.zeros(3)
    gone = threading.Event()
    weakref.finalize(tensor, gone.set)
    edge.put([tensor])
    del tensor
    gpu.made.set()
    gc.collect()
    assert gone.wait(LIMIT)  # though the thread lives, and waits for the next message
    edge.stop()


def test_a_message_without_elements_is_told_but_not_posted(gpu: Gpu) -> None:
    gpu.made.set()
    edge = Outgoing("edge", CPU, gpu.post, gpu.tell, lambda: None)
    edge.put([])
    edge.stop()
    edge.join(LIMIT)
    assert gpu.log == ["tell", "heard"]


def test_after_an_error_nothing_more_is_sent(gpu: Gpu) -> None:
    gpu.fault = "device-side assert"
    gpu.made.set()
    edge = Outgoing("edge", CPU, gpu.post, gpu.tell, lambda: gpu.log.append("failed"))
    for _ in range(2):
        edge.put([torch.zeros(1)])
    edge.stop()
    edge.join(LIMIT)
    assert gpu.log == ["failed"]
    with pytest.raises(RuntimeError, match="device-side assert"):
        edge.check()


def test_a_receive_is_posted_when_its_message_is_told(gpu: Gpu) -> None:
    told = threading.Event()

    class Hear:
        def wait(self) -> None:
            assert told.wait(LIMIT)

    edge = Incoming("edge", CPU, gpu.post, Hear)
    found = [edge.put(pack(torch.zeros(size))[0]) for size in (2, 0)]
    assert gpu.log == []
    told.set()
    (first,), work = found[0].result(LIMIT)
    assert first.shape == (2,)
    assert work is not None
    (second,), work = found[1].result(LIMIT)
    assert second.shape == (0,)
    assert work is None
    assert gpu.log == ["post 8"]  # bytes
    edge.stop()
    edge.join(LIMIT)


def test_a_lost_connection_reaches_whoever_waits(gpu: Gpu) -> None:
    def hear() -> Any:
        raise RuntimeError("connection closed by peer")

    edge = Incoming("edge", CPU, gpu.post, hear)
    found = [edge.put(pack(torch.zeros(2))[0]) for _ in range(2)]
    for each in found:
        with pytest.raises(RuntimeError, match="connection closed"):
            each.result(LIMIT)
    edge.stop()
    edge.join(LIMIT)
