"""After a rank was lost, the processes that are left build a new pipeline; on GPUs, in ``test_nccl_lost.py``."""

from __future__ import annotations

from pathlib import Path

from sternway.errors import LostRankError, PipelineError
from workers import STEPS, Ending, Workers

HEARTBEAT_TIMEOUT, LIMIT = 6.0, 300.0  # LIMIT only ends a test that hangs


def test_the_processes_that_are_left_go_on(tmp_path: Path) -> None:
    with Workers(3, "cpu") as workers:
        for ending in (Ending("SIGKILL", rank=2), Ending("raise", rank=1, backward=True)):
            told = workers.live(ending, HEARTBEAT_TIMEOUT, tmp_path, LIMIT)
            for rank in set(range(3)) - {ending.rank}:
                assert told[rank].error == LostRankError.__name__, told[rank].text
                assert f"rank {ending.rank} was lost during step 2" in told[rank].text
                assert told[rank].steps == 2
        assert told[1].error == PipelineError.__name__
        for last in workers.live(Ending("none"), HEARTBEAT_TIMEOUT, tmp_path, LIMIT).values():
            assert (last.error, last.steps) == ("none", STEPS), last.text
