"""One backward in three ways: fused, torch's split and ours; how long each takes, and how many bytes it holds."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway import split
from sternway._torch.saved_hooks import intercept
from sternway._tree import leaves

Weights = Callable[[], Any]  # W, to be called later
Way = Callable[[Tensor, Tensor], Weights]  # I, given the stage's input and output


class ThreeWays:
    """A pipeline stage, ready to run its backward in each way.

    Args:
        model: maps a tensor to a tensor of the same shape.
        x: its input; each forward gets a copy that needs a gradient.
        forward: how to call the model, if not plainly.
    """

    def __init__(self, model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> None:
        self.model, self.x = model, x
        self._forward = forward or model
        self.grad = torch.randn_like(self._forward(x))
        self.ways: dict[str, Way] = {"fused": self._fused, "torch": self._torch, "sternway": self._ours}

    def forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.clone().requires_grad_()
        return x, self._forward(x)

    def _fused(self, x: Tensor, y: Tensor) -> Weights:
        torch.autograd.backward(y, self.grad)
        return lambda: None

    def _torch(self, x: Tensor, y: Tensor) -> Weights:
        from torch.distributed.pipelining import stage

        theirs: Any = stage  # it imports both functions, and does not export them
        _, groups = theirs.stage_backward_input([y], [self.grad], [x], self.model.parameters())
        return lambda: theirs.stage_backward_weight(self.model.parameters(), groups)

    def _ours(self, x: Tensor, y: Tensor) -> Weights:
        _, pending = split.backward_input(y, self.grad, x, own_thread=True)  # as a pipeline calls it
        return pending.run

    def worst_error(self) -> float:
        """The largest relative difference between a parameter's gradient from our split and from the fused backward."""
        results = []
        state = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for way in (self._fused, self._ours):
            self.model.zero_grad()
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state[name])
            way(*self.forward())()
            results.append([p.grad.double() for p in self.model.parameters() if p.grad is not None])
        pairs = zip(*results, strict=True)
        return max(float((mine - fused).norm() / fused.norm()) for fused, mine in pairs)

    def time(self, rounds: int, progress: Callable[[], None] = lambda: None) -> dict[str, SplitTimes]:
        """Run each way ``rounds`` times, in turn with the fused one, with Python's garbage collector off.

        Each way has rounds of its own: torch's split registers hooks, and ours is careful after somebody else's.
        """
        found = {}
        for name, way in self.ways.items():
            pairs, fused = [], []
            for _ in range(3):
                self._once(self._fused)
                self._once(way)
            gc.collect()
            gc.disable()
            try:
                for _ in range(rounds):
                    fused.append(self._once(self._fused))
                    pairs.append(self._once(way))
                    progress()
            finally:
                gc.enable()
            found[name] = SplitTimes.of(pairs, fused)
        return found

    def _once(self, way: Way) -> tuple[float, float]:
        x, y = self.forward()
        self._wait()
        clock = self._clock()
        start = clock()
        weights = way(x, y)
        self._wait()
        middle = clock()
        weights()
        self._wait()
        return middle - start, clock() - middle

    def _clock(self) -> Callable[[], float]:
        """Seconds; where one thread does all the work, those that it ran, whatever else the machine does meanwhile."""
        return time.thread_time if self.x.is_cpu and torch.get_num_threads() == 1 else time.perf_counter

    def _wait(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def held(self, name: str) -> tuple[int, int]:
        """Bytes alive after the forward, and after I, once the output and the input's gradient are gone."""
        gc.collect()
        before = [*self.model.parameters(), *self.model.buffers(), self.x, self.grad]
        before += [p.grad for p in self.model.parameters() if p.grad is not None]
        with _counting(self.x.device, before) as alive:
            x, y = self.forward()
            self._wait()
            after_forward = alive()
            weights = self.ways[name](x, y)
            x.grad = None
            del y
            self._wait()
            after_i = alive()
            weights()
        return after_forward, after_i


@dataclass(frozen=True, slots=True)
class SplitTimes:
    """Medians over the rounds, in milliseconds: I, W, and the fused backward that ran in turn with them.

    ``ratio`` is (I + W) / fused, the median of the rounds' own ratios.
    """

    i: float
    w: float
    fused: float
    ratio: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float]], fused: list[tuple[float, float]]) -> SplitTimes:
        return cls(
            i=1e3 * statistics.median(i for i, _ in pairs),
            w=1e3 * statistics.median(w for _, w in pairs),
            fused=1e3 * statistics.median(whole for whole, _ in fused),
            ratio=statistics.median((i + w) / whole for (i, w), (whole, _) in zip(pairs, fused, strict=True)),
        )


@contextmanager
def _counting(device: torch.device, before: list[Tensor]) -> Iterator[Callable[[], int]]:
    """A function that tells how many bytes are allocated now, beside the tensors that were there ``before``.

    On the CPU, where the allocator does not count, every storage that an operator returns is followed until it dies.
    """
    if device.type == "cuda":
        start = _requested()
        yield lambda: _requested() - start
        return
    alive: dict[int, int] = {}
    old = {tensor.untyped_storage().data_ptr() for tensor in before}  # an operator may return a view of one

    def run(operator: Any, args: Any, kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in alive and storage.data_ptr() not in old:
                    alive[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, alive.pop, id(storage), None)
        return result

    with intercept(run):
        yield lambda: sum(alive.values())


def _requested() -> int:
    """Bytes on the device as they were asked for; what is allocated for them is rounded up."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
