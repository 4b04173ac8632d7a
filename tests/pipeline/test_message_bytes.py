"""What messages take of a rank's memory, step by step: between GPUs they are there only while they travel."""

from __future__ import annotations

from sternway import schedule
from sternway.pipeline.build._message_bytes import message_bytes
from sternway.pipeline.build._weigh import StageWeight
from sternway.pipeline.transport._herald import NOTICE_BYTES

SIZE = 10


def held(plan: schedule.Schedule, rank: int) -> dict[str, int]:
    """The bytes of messages between GPUs in each step, of stages that keep nothing of what they send."""
    weights = [StageWeight(0, 0, SIZE, {}, sent=SIZE) for _ in range(plan.num_stages)]
    steps = map(str, plan.actions[rank])
    return dict(zip(steps, map(sum, message_bytes(plan, rank, weights, gpus=True)), strict=True))


def test_a_message_is_there_while_it_travels_and_in_the_step_that_it_is_for() -> None:
    plan = schedule.make("1f1b", ranks=2, microbatches=2)
    assert held(plan, 0) == {"0F0": 0, "0F1": SIZE, "0B0": 2 * SIZE, "0B1": SIZE}
    assert held(plan, 1) == {"1F0": SIZE, "1B0": 0, "1F1": 2 * SIZE, "1B1": 0}


def test_what_a_stage_passes_to_another_of_its_rank_does_not_travel() -> None:
    plan = schedule.make("zb-v", ranks=1, microbatches=1)
    assert held(plan, 0) == {"0F0": 0, "1F0": 0, "1I0": 0, "1W0": SIZE, "0I0": 0, "0W0": 0}


def test_what_a_rank_tells_the_next_one_of_a_step_is_there_until_the_end() -> None:
    plan = schedule.make("zb-v", ranks=3, microbatches=6)
    weights = [StageWeight(0, 0, 0, {}, sent=0) for _ in range(plan.num_stages)]
    for rank, told in enumerate((NOTICE_BYTES, NOTICE_BYTES, 0)):
        assert set(map(sum, message_bytes(plan, rank, weights))) == {told}
