"""Ways to lose a rank, and the moments of a step and of a save at which to do so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sternway._tree import leaves
from sternway.pipeline import Pipeline
from sternway.pipeline.checkpoint import _files as files
from sternway.pipeline.checkpoint._checkpoint import Checkpoints
from sternway.pipeline.checkpoint._tensors import Writing

KINDS = ("SIGKILL", "SIGSTOP", "exception", "cut")
STEP_PHASES = ("forward", "backward", "before the optimizer", "after the optimizer")
SAVE_PHASES = ("copying", "writing", "written", "renaming", "pruning")
LEADER_ONLY = ("renaming", "pruning")


@dataclass(frozen=True, slots=True)
class Fault:
    """One rank is lost in one way, at one moment of one step or of the save after it."""

    kind: str
    rank: int
    step: int
    phase: str


class Injector:
    """Makes a fault happen in this process; ``at`` is called by the training loop, the rest hangs on what runs."""

    def __init__(self, fault: Fault, pipe: Pipeline, dies: Callable[[float], None]) -> None:
        self._fault, self._pipe, self._dies = fault, pipe, dies
        self._step = -1
        self._done = False
        if fault.phase in ("forward", "backward"):
            for stage in pipe.stages.values():
                stage.module.register_forward_hook(self._on_forward)
        patches: dict[str, tuple[Any, str]] = {
            "copying": (Checkpoints, "_copied"),
            "writing": (Writing, "write"),
            "written": (files, "digest"),
            "renaming": (files, "_sync"),
            "pruning": (files, "prune"),
        }
        if fault.phase in patches:
            owner, name = patches[fault.phase]
            real = getattr(owner, name)

            def patched(*arguments: Any, **options: Any) -> Any:
                self._strike()
                return real(*arguments, **options)

            setattr(owner, name, patched)

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step

    def at(self, phase: str) -> None:
        """The training loop is at this point."""
        if phase == self._fault.phase:
            self._strike()

    def _on_forward(self, module: Any, inputs: Any, output: Any) -> None:
        if self._fault.phase == "forward":
            self._strike()
        else:
            for tensor in leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._strike())
                    return

    def _strike(self) -> None:
        if self._done or self._step < self._fault.step:
            return
        self._done = True
        self._dies(time.monotonic())
        kind = self._fault.kind
        if kind in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, kind))
            time.sleep(1)  # a stop takes effect on all threads a moment later
        elif kind == "cut":
            self._pipe.transport._groups.wake()
        else:
            raise RuntimeError("an exception of the chaos test")
