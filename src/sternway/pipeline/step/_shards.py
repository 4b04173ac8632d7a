"""What ``fully_shard`` made of a stage, under the command of the schedule.

    UNSHARD      ``gather``: starts; each module waits for its own parameters when it is called
    F, I, W, B   compute on gathered parameters. Gradients stay unsharded, summed over the microbatches (``keep_grads``)
    REDUCE_GRAD  ``reduce``: starts to average them over the processes, which each keep their shard
    RESHARD      ``free``

At the end of the step ``finish`` makes the stream wait for the reductions. Outside of a step FSDP is as it always is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sternway._torch import require
from sternway._torch.sharded import FsdpUnit, fsdp_units
from sternway._tree import replace_leaves
from sternway.pipeline.forward._part import ModelPart
from sternway.schedule import UpkeepOp


class StageShards:
    """The FSDP modules of one stage.

    Attributes:
        names: of the parameters that they hold, in the stage.
        gathers: how often the stage was gathered.
    """

    def __init__(self, module: nn.Module, is_first: bool, is_last: bool) -> None:
        require("pipeline.sharded")
        self._units = fsdp_units(module)
        self._gathered = False
        # Of a whole model that is cut, FSDP casts what the model is given and what it returns.
        cut = isinstance(module, ModelPart)
        self._inside = {id(module)} if cut and not is_first else set()
        self._goes_on = {id(module)} if cut and not is_last else set()
        held = {id(parameter) for unit in self._units for parameter in unit.sharded()}
        self.names = frozenset(name for name, p in module.named_parameters() if id(p) in held)
        self.gathers = 0
        sizes = [sum(p.numel() * p.element_size() for p in unit.sharded()) for unit in self._units]
        self._before = {
            unit: done / (sum(sizes) or 1) for unit, done in zip(self._units, accumulate(sizes), strict=True)
        }
        self._begun = 0.0
        self._noted: Callable[[float], None] = _unnoted
        for unit in self._units:
            enter, leave = (functools.partial(method, unit) for method in (self._enter, self._leave))
            unit.command(lambda: self._gathered, enter, leave)

    @classmethod
    def of(cls, module: nn.Module, is_first: bool, is_last: bool) -> StageShards | None:
        """Those of a stage; None if it has none."""
        has_some = any(isinstance(each, FSDPModule) for each in module.modules())
        return cls(module, is_first, is_last) if has_some else None

    def run(self, op: UpkeepOp, noted: Callable[[float], None]) -> None:
        """Do what a schedule says; ``noted`` as in ``gather``."""
        if op == "UNSHARD":
            self.gather(noted)
        else:
            {"RESHARD": self.free, "REDUCE_GRAD": self.reduce}[op]()

    def gather(self, noted: Callable[[float], None]) -> None:
        """Start to gather all parameters.

        ``noted`` is called with the time at which all have arrived, as far as it is seen: where the host waits for some
        of them, these took their part of the time.
        """
        self._gathered, self._noted, self._begun = True, noted, time.perf_counter()
        self.gathers += 1
        for unit in self._units:
            unit.gather()

    def wait(self, all_units: bool = True) -> None:
        """Wait for the parameters; if not for all, for those of modules that are not called, which cannot wait."""
        for unit in self._units:
            if all_units or not unit.is_called:
                self._wait(unit)

    def _wait(self, unit: FsdpUnit) -> None:
        arrived = unit.wait()
        if arrived is not None:
            self._noted(self._begun + (arrived - self._begun) / (self._before[unit] or 1.0))

    def keep_grads(self) -> None:
        """After a W or B: add its gradients to those of earlier microbatches, in FSDP's ``reduce_dtype``."""
        for unit in self._units:
            unit.keep_grads()

    def reduce(self) -> None:
        """Start to reduce the gradients, those of the last modules first, as a backward would."""
        for unit in reversed(self._units):
            unit.reduce()

    def free(self) -> None:
        """Free what was gathered."""
        for unit in self._units:
            unit.free()
        self._gathered = False

    def finish(self) -> None:
        """Wait for the reductions; afterwards the gradients are those of the sharded parameters."""
        for unit in self._units:
            unit.finish()
        for unit in self._units:
            unit.release()
        self._noted = _unnoted

    def drop(self) -> None:
        """After a step that failed: free what is gathered, and forget its gradients."""
        self._noted = _unnoted
        if self._gathered:
            self._gathered = False
            for unit in self._units:
                unit.abandon()

    def _enter(self, unit: FsdpUnit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a forward: wait for its parameters, and cast what it gets by FSDP's policy."""
        self._wait(unit)
        if unit.policy.cast_forward_inputs and id(module) not in self._inside:
            args, kwargs = _cast((args, kwargs), unit.policy.param_dtype)
        return args, kwargs

    def _leave(self, unit: FsdpUnit, module: nn.Module, output: Any) -> Any:
        """After a forward: what it returns, cast by FSDP's policy."""
        return output if id(module) in self._goes_on else _cast(output, unit.policy.output_dtype)


def _unnoted(end: float) -> None:
    """Between steps, nobody wants to know when parameters arrive."""


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """The floating-point tensors of a tree in a dtype, as FSDP casts them."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return replace_leaves(cast, tree)
