"""Averages of gradients over processes that hold the same parameters and get different rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch.dtensors import local_part
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._mesh import PipelineMesh

BUCKET_BYTES = 25 * 2**20


class Copies:
    """Averages each parameter's gradient along the dimensions of a mesh along which nobody else does.

    Args:
        mesh: of the pipeline.
        stages: of this process.
        collective: makes one of some global ranks; all of them call it.
        reduce_dtype: of the sums; that of the gradients by default.
    """

    def __init__(
        self,
        mesh: PipelineMesh,
        stages: Mapping[int, Stage],
        collective: Callable[[Sequence[int]], Collective],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._mesh = mesh
        named = [(stage, *each) for stage in stages.values() for each in stage.module.named_parameters()]
        self._by_fsdp = {id(p) for stage, name, p in named if stage.shards is not None and name in stage.shards.names}
        summed = [(p, mesh.summed(p, id(p) in self._by_fsdp)) for _, _, p in named if p.requires_grad]
        self._summed = [(parameter, times) for parameter, times in summed if times > 1]
        self._handles: list[Any] = []
        found = {self._dims(parameter) for _, _, parameter in named}
        ways = sorted(dims for dims in found if dims)  # so that all processes make them in the same order
        self._averages = {dims: DataParallel(collective(mesh.along(dims)), reduce_dtype) for dims in ways}

    def _dims(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return self._mesh.averaged(parameter, id(parameter) in self._by_fsdp)

    def begin(self) -> None:
        """A step begins: divide gradients that are sums over processes, by hooks: .grad may have some already."""
        self.end()
        for parameter, times in self._summed:
            self._handles.append(parameter.register_hook(partial(torch.mul, 1 / times)))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """A step is over, or has failed: remove these hooks."""
        while self._handles:
            self._handles.pop().remove()

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to average these parameters' gradients."""
        groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            if dims := self._dims(parameter):
                groups.setdefault(dims, []).append(parameter)
        for dims, group in groups.items():
            self._averages[dims].start(group)

    def finish(self) -> None:
        """Wait for the averages and copy them into ``.grad``."""
        for average in self._averages.values():
            average.finish()


class DataParallel:
    """Averages gradients over some processes, in buckets; in ``reduce_dtype``, if given."""

    def __init__(self, copies: Collective, reduce_dtype: torch.dtype | None = None) -> None:
        self._copies, self._reduce_dtype = copies, reduce_dtype
        self._running: list[tuple[Any, Tensor, list[Tensor]]] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin to average these parameters' gradients."""
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # another copy may have one
            if parameter.grad is not None:
                grad = local_part(parameter.grad)
                full = sum(each.nbytes for each in bucket) + grad.nbytes > BUCKET_BYTES
                if bucket and (full or bucket[0].dtype != grad.dtype):
                    self._reduce(bucket)
                    bucket = []
                bucket.append(grad)
        if bucket:
            self._reduce(bucket)

    def _reduce(self, grads: list[Tensor]) -> None:
        flat = torch.cat([grad.flatten() for grad in grads]).to(self._reduce_dtype or grads[0].dtype)
        self._running.append((self._copies.sum(flat), flat, grads))

    def finish(self) -> None:
        """Wait for the averages and copy them into ``.grad``."""
        for work, flat, grads in self._running:
            work.wait()
            flat /= self._copies.size
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self._running.clear()
