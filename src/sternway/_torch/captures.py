"""CUDA graphs in a row, with calls of Python between them, and captures that fail cleanly.

    F   graph                          each place that Python has in the backward begins anew here: ``begin``
    I   graph ─▶ call ─▶ graph         the capture is ended at a call, and goes on in another graph after it: ``pause``
    W   graph

What a call gets is in the graphs' memory, and what it returns is copied to where the next graph reads it. So calls see
the values of each replay, and nothing is captured anew.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway._torch.probe import probe

Call = Callable[[Any, list[Tensor]], Sequence[Tensor]]
"""Gets what ``Places.begin`` made for its place, and tensors; returns one for each."""


class Places:
    """The places in one forward that have calls of Python in its backward."""

    def __init__(self) -> None:
        self.keys: list[object] = []
        self._begins: list[Callable[[], Any]] = []

    def add(self, key: object, begin: Callable[[], Any]) -> None:
        """Note a place, as ``pause`` will name it; ``begin`` is called in each replay of the forward."""
        self.keys.append(key)
        self._begins.append(begin)

    def begin(self) -> list[Any]:
        """What each place has in this replay."""
        return [begin() for begin in self._begins]

    def index(self, key: object) -> int:
        return next(index for index, each in enumerate(self.keys) if each is key)


@dataclass(frozen=True, slots=True)
class _Pause:
    """A call between two graphs."""

    place: int
    call: Call
    arriving: list[Tensor]  # in the memory of the graph before it
    given: list[Tensor]  # read by the graph after it

    def replay(self, begun: Sequence[Any]) -> None:
        found = self.call(begun[self.place], [tensor.clone() for tensor in self.arriving])
        for mine, tensor in zip(self.given, found, strict=True):
            mine.copy_(tensor)


class GraphSequence:
    """Graphs that are replayed one after the other, and the calls between them; ``capturing`` makes one."""

    def __init__(self, pool: Any, places: Places) -> None:
        self.places = places
        self._pool = pool
        self._stream = torch.cuda.current_stream()
        self._steps: list[torch.cuda.CUDAGraph | _Pause] = []
        # Only a relaxed capture may be ended by another thread than the one that began it: the engine's.
        self._mode = "relaxed" if places.keys else "thread_local"

    def is_here(self) -> bool:
        """Whether the current stream is the one on which it is captured."""
        return bool(self._stream == torch.cuda.current_stream())

    def start(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)

    def stop(self) -> None:
        self._graph.capture_end()
        self._steps.append(self._graph)

    def pause(self, key: object, tensors: list[Tensor], call: Call) -> list[Tensor]:
        """End the capture, note the call, and go on in another graph; returns what that one reads."""
        self.stop()
        given = [torch.zeros_like(tensor) for tensor in tensors]
        self._steps.append(_Pause(self.places.index(key), call, tensors, given))
        self.start()
        return given

    def replay(self, begun: Sequence[Any] = ()) -> None:
        """Run all of it, with what ``Places.begin`` returned in the forward."""
        for step in self._steps:
            step.replay(begun) if isinstance(step, _Pause) else step.replay()


_CAPTURES: list[GraphSequence] = []  # those that are under way


def current_capture() -> GraphSequence | None:
    """What is being captured on the current stream by ``capturing``."""
    if not _CAPTURES or not torch.cuda.is_current_stream_capturing():
        return None
    return next((sequence for sequence in _CAPTURES if sequence.is_here()), None)


class _Preparing(threading.local):
    depth = 0


_preparing = _Preparing()


def is_preparing() -> bool:
    """Whether this thread runs a forward for a capture, or to learn of it: one whose numbers nobody sees."""
    return _preparing.depth > 0


@contextmanager
def preparing() -> Iterator[None]:
    """A block whose forwards are for captures."""
    _preparing.depth += 1
    try:
        yield
    finally:
        _preparing.depth -= 1


@contextmanager
def capturing(pool: Any, places: Places) -> Iterator[GraphSequence]:
    """Capture what the block launches on the current stream. Other threads may use the device meanwhile."""
    sequence = GraphSequence(pool, places)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # an I or a W may have nothing to do
        sequence.start()
        _CAPTURES.append(sequence)
        try:
            yield sequence
            sequence.stop()
        except BaseException:
            with suppress(RuntimeError):
                sequence.stop()
            _end_capture_of_random_numbers()
            raise
        finally:
            _CAPTURES.remove(sequence)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """A block in which cuBLAS takes workspaces anew, so that those of a capture are in the capture's own pool.

    torch keeps one for each stream and thread, until somebody clears them: Inductor does before it records a graph, and
    so does the end of any graph that was captured on the same stream. A graph that was captured with an earlier
    workspace would then work in memory that is gone (https://github.com/pytorch/pytorch/issues/193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _end_capture_of_random_numbers() -> None:
    """Let the device's generator leave the capture that failed: only the end of one that succeeds tells it to."""
    empty = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()


@probe(
    "torch._C._cuda_clearCublasWorkspaces",
    expected="is there, where torch was built with CUDA",
    features=("split.capture",),
)
def _workspaces() -> bool:
    return torch.version.cuda is None or callable(torch._C._cuda_clearCublasWorkspaces)
