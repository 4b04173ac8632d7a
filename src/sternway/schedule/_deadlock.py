"""Do ranks ever wait for each other in a circle? And why blocking sends do not change the answer.

A rank runs its actions in order, and an action waits for what its neighbours make. The schedule can run
if and only if that has no circle, which is what ``find_circle`` looks for.

That is with sends that do not block. With sends that do, the naive runtime (send right after the action,
receive right before the one that needs it) hangs even on 1F1B: one rank sends an activation down while
the other sends a gradient up, and neither receives. What helps is to give each transfer the same place on
both sides. Run the schedule once, in any order in which it can run, and write down each transfer when its
sender's action is done, on both ranks:

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1          0RECV_B0 0B0 ...
    rank 1       1RECV_F0     1RECV_F1 1F0 1B0  1SEND_B0     ...

All actions and transfers now have one order of which each rank's list is a part. So when a rank has
reached a transfer, whatever stands before it on the other side can be done without it, and the other side
arrives: no transfer waits for ever, however sends and receives block, in either direction. Any schedule
that passes here therefore runs with blocking sends, placed as ``to_csv("compute_comms")`` writes them
(``_transfers`` does the placing, and tests run them with both sides blocking).
torch.distributed.pipelining places them the same way.
"""

from collections import deque

from sternway.errors import ScheduleError
from sternway.schedule._action import Action
from sternway.schedule._schedule import Schedule


def find_circle(schedule: Schedule) -> ScheduleError | None:
    """Return an error that names a circle of waiting ranks, or None if the schedule can run.

    Args:
        schedule: one that is placed, complete and ordered on each rank.
    """
    reached = run_order(schedule)[1]
    if all(at == len(steps) for at, steps in zip(reached, schedule.actions, strict=True)):
        return None
    return _describe(schedule, reached)


def waits_for(schedule: Schedule, action: Action) -> tuple[int, bool, int] | None:
    """Return what an action waits for of another stage: (stage, is it a gradient, microbatch)."""
    if action.op == "F":
        return (action.stage - 1, False, action.microbatch) if action.stage else None
    if action.op == "W" or action.stage + 1 == schedule.num_stages:
        return None
    return action.stage + 1, True, action.microbatch


def run_order(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """Run the schedule without times: one step of each rank in turn, as far as it goes.

    Returns:
        (rank, step) in an order in which they can run, and how many steps each rank got through.
    """
    m = schedule.n_microbatches
    last = schedule.num_stages - 1
    # Whether each activation and each gradient is made, by (2 * stage + is_gradient) * m + microbatch.
    made = bytearray(2 * schedule.num_stages * m)
    waiting: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    reached = [0] * schedule.ranks
    turns = deque(range(schedule.ranks))
    while turns:
        rank = turns.popleft()
        if reached[rank] == len(schedule.actions[rank]):
            continue
        actions = schedule.actions[rank][reached[rank]].actions
        blocked = -1
        for action in actions:
            if action.op == "F":
                need = 2 * (action.stage - 1) * m + action.microbatch if action.stage else -1
            elif action.op == "W" or action.stage == last:
                need = -1
            else:
                need = (2 * action.stage + 3) * m + action.microbatch
            if need >= 0 and not made[need]:
                blocked = need
                break
        if blocked >= 0:
            waiting[blocked] = rank
            continue
        order.append((rank, reached[rank]))
        reached[rank] += 1
        turns.append(rank)
        for action in actions:
            if action.op != "W":
                key = (2 * action.stage + (action.op != "F")) * m + action.microbatch
                made[key] = 1
                if key in waiting:
                    turns.append(waiting.pop(key))
    return order, reached


def _describe(schedule: Schedule, reached: list[int]) -> ScheduleError:
    """Follow who waits for whom from any stuck rank until a rank comes up again; tell the circle."""
    holder = schedule.stage_ranks()
    step_of = {
        (part.stage, part.op != "F", part.microbatch): index
        for steps in schedule.actions
        for index, step in enumerate(steps)
        for part in step.actions
        if part.op != "W"
    }
    rank = next(r for r, steps in enumerate(schedule.actions) if reached[r] < len(steps))
    seen: dict[int, int] = {}
    told: list[tuple[str, str]] = []
    while rank not in seen:
        seen[rank] = len(told)
        step = reached[rank]
        need = next(
            need
            for part in schedule.actions[rank][step].actions
            if (need := waits_for(schedule, part)) is not None and step_of[need] >= reached[holder[need[0]]]
        )
        other = holder[need[0]]
        wanted = schedule.actions[other][step_of[need]]
        told.append(
            (
                f"{schedule.actions[rank][step]} (rank {rank}, step {step}) waits for {wanted} "
                f"(rank {other}, step {step_of[need]})",
                f"on rank {other}, run {wanted} before {schedule.actions[other][reached[other]]}",
            )
        )
        rank = other
    circle = told[seen[rank] :]
    return ScheduleError(
        "ranks never wait for each other in a circle",
        got="a deadlock: " + "; ".join(line for line, _ in circle),
        fix=" or ".join(fix for _, fix in circle[:2]),
    )
