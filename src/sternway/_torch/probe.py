"""Probes: does this torch still do what we need?

Probes run in a thread of their own, since a thread starts with gradients on, no autocast, no hooks and no modes,
whatever the caller has set. They draw no random numbers.

The thread never ends: torch 2.11 crashes on fake tensors if the thread that made the first ones has ended, where it is
built with CUDA and finds no GPU. After a probe that failed, which may have left modes behind, the next gets a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, get_args

import torch
from torch.utils.hooks import RemovableHandle

from sternway.errors import SternwayError, UnsupportedTorch

Feature = Literal[
    "hooks",
    "saved",
    "saved.mutable",
    "state",
    "state.compiled",
    "split",
    "split.checkpoint",  # apart, and the next too: their probes import Dynamo and FSDP, which takes seconds
    "split.parallel",
    "split.compiled",
    "split.compiled.sharded",
    "split.learned",
    "split.capture",
    "split.install",
    "split.native",
    "graph",
    "pipeline",
    "pipeline.fit",
    "pipeline.sharded",
]
"""What a user loses where a probe fails."""


class _ProbeThread:
    """Runs checks, one after the other."""

    def __init__(self) -> None:
        self._checks: SimpleQueue[tuple[Callable[[], object], SimpleQueue[str | None]]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="sternway probes", daemon=True)
        self.thread.start()

    def fault_of(self, check: Callable[[], object]) -> str | None:
        answer: SimpleQueue[str | None] = SimpleQueue()
        self._checks.put((check, answer))
        return answer.get()

    def _work(self) -> None:
        while True:
            check, answer = self._checks.get()
            answer.put(_fault_of(check))


def _fault_of(check: Callable[[], object]) -> str | None:
    try:
        return None if check() else "something else"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


_RUNNING: list[_ProbeThread] = []  # the one that takes checks
_ASKING = threading.RLock()


def _in_own_thread(check: Callable[[], object]) -> str | None:
    """What went wrong in a check, if anything."""
    if _RUNNING and threading.current_thread() is _RUNNING[0].thread:
        return _fault_of(check)  # a check that needs another feature
    with _ASKING:
        if not _RUNNING or not _RUNNING[0].thread.is_alive():  # in a process that was forked it is not
            _RUNNING[:] = [_ProbeThread()]
        fault = _RUNNING[0].fault_of(check)
        if fault is not None:
            _RUNNING.clear()
        return fault


@dataclass(frozen=True, slots=True)
class Probe:
    """One private name of torch.

    Attributes:
        name: torch's own name for it, as one would search for it.
        expected: what we need it to do.
        features: what does not work without it.
        check: a tiny real use; false, or an exception, where torch does not do it any more.
        hooks: how many hooks ``check`` registers.
    """

    name: str
    expected: str
    features: tuple[Feature, ...]
    check: Callable[[], object]
    hooks: int = 0

    def fault(self) -> str | None:
        """What went wrong, or None if torch does what we need."""
        before = RemovableHandle.next_id
        found = _in_own_thread(self.check)
        if found is None and RemovableHandle.next_id - before < self.hooks:  # other threads may have added some
            return f"fewer hooks than {self.hooks} registered"
        if found is None:
            with _COUNTING:
                HOOKS_OF_PROBES[0] += self.hooks
        return found


_PROBES: list[Probe] = []
_COUNTING = threading.Lock()
HOOKS_OF_PROBES = [0]
"""How many hooks probes have registered; see ``hooks.hooks_registered``."""


def probe(
    name: str, *, expected: str, features: tuple[Feature, ...], hooks: int = 0
) -> Callable[[Callable[[], object]], Probe]:
    """Make a ``Probe`` of a function, and register it.

    Example:
        >>> @probe("Tensor._version", expected="counts in-place changes", features=("split", "saved"))
        ... def _version():
        ...     tensor = torch.zeros(1)
        ...     before = tensor._version
        ...     return tensor.add_(1)._version == before + 1                    # doctest: +SKIP
    """

    def register(check: Callable[[], object]) -> Probe:
        made = Probe(name, expected, features, check, hooks)
        _PROBES.append(made)
        return made

    return register


def all_probes() -> tuple[Probe, ...]:
    """Every probe of every module of this folder."""
    for module in sorted(Path(__file__).parent.glob("*.py")):
        import_module(f"sternway._torch.{module.stem}".removesuffix(".__init__"))
    return tuple(_PROBES)


@cache  # an exception is not kept: a feature that failed is probed again at its next use
def require(feature: Feature) -> None:
    """Raise ``UnsupportedTorch`` unless this torch does all that ``feature`` needs; probed once per process.

    Example:
        >>> require("split")
    """
    if feature not in get_args(Feature):
        raise SternwayError("a feature must be one of those that probes name", got=repr(feature))
    for each in all_probes():
        if feature in each.features and (fault := each.fault()) is not None:
            raise UnsupportedTorch(
                f"{each.name} must do what {' and '.join(each.features)} need: it {each.expected}",
                got=f"{fault} with torch {torch.__version__}",
                fix="use a release of torch that `sternway doctor` passes, or one of sternway that knows this torch",
            )
