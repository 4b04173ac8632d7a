"""A run on four processes that is killed a few times; the long version is benchmarks/chaos/main.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chaos.fault import Fault
from chaos.lives import Run, live, newest

FAULTS = [
    Fault("SIGKILL", 2, 1, "backward"),
    Fault("exception", 1, 3, "writing"),
    Fault("SIGSTOP", 3, 3, "forward"),
    Fault("SIGKILL", 0, 4, "renaming"),
    Fault("cut", 1, 5, "before the optimizer"),
]

LIMIT = 300.0  # only ends a run that hangs


def test_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = Run(tmp_path / "disturbed", steps=8, heartbeat_timeout=6)
    calm = live(replace(run, directory=tmp_path / "calm"), None, LIMIT)
    assert calm.weights
    for fault in FAULTS:
        life = live(run, fault, LIMIT)
        assert life.died is not None, fault
        assert not life.hung, (fault, life)
        assert life.reports.keys() | {fault.rank} == {0, 1, 2, 3}, (fault, life)
        assert newest(run.directory) >= life.saved, (fault, life)
    assert live(run, None, LIMIT).weights == calm.weights
