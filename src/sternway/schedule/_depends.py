"""What waits for what, and an order in which a schedule can run.

For one microbatch, on stage s:

    F of s         waits for F of s - 1                    the activation
    I or B of s    waits for I or B of s + 1, and F of s   the gradient, and what the forward saved
    W of s         waits for I of s

Where the model is there in several copies, each is a chain of stages of its own, and s is counted from its first one.
A result is there at once on the rank that computed it, and ``comm`` later on any other rank.

This is the only place where the rule is written. ``check``, ``simulate``, the search and the CSV writer all read the
tables below. In them, the *steps* of a microbatch are numbered ``3 * stage + kind``: kind 0 is F, 1 is I or B, 2 is W.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Op
from sternway.schedule._schedule import Schedule

KIND: dict[Op, int] = {"F": 0, "I": 1, "B": 1, "W": 2}


def step_number(action: Action) -> int:
    """Return the number of an action's step: ``3 * stage + kind``."""
    return 3 * action.stage + KIND[action.op]


@lru_cache(maxsize=16)
def needs(num_stages: int, copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return, for each step, the steps of the same microbatch that it waits for.

    The first of them is the last to finish: where the gradient of a stage has arrived, its forward has run.

    Example:
        >>> needs(2)      # F, I and W of stage 0, then of stage 1
        ((), (4, 0), (1,), (0,), (3,), (4,))
    """
    table: list[tuple[int, ...]] = []
    chain = 3 * num_stages // copies
    for forward in range(0, 3 * num_stages, 3):
        backward, last = forward + 1, (forward + 3) % chain == 0
        table.append((forward - 3,) if forward % chain else ())
        table.append((forward,) if last else (backward + 3, forward))
        table.append((backward,))
    return tuple(table)


@lru_cache(maxsize=16)
def feeds(num_stages: int, copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return, for each step, the steps that can run once it has: those whose first need it is.

    Example:
        >>> feeds(2)
        ((3,), (2,), (), (4,), (1, 5), ())
    """
    table: list[list[int]] = [[] for _ in range(3 * num_stages)]
    for step, sources in enumerate(needs(num_stages, copies)):
        if sources:
            table[sources[0]].append(step)
    return tuple(map(tuple, table))


def run(schedule: Schedule) -> Iterator[tuple[int, list[int], list[int]]]:
    """Run the schedule without times: one step of each rank in turn, until all are done or none can go on.

    Yields:
        For each step, in an order in which they can run: its rank, what it waits for, and what it computes, the latter
        two as ``step * n_microbatches + microbatch``.

    Raises:
        ScheduleError: an action is of a stage or a microbatch that the schedule does not have.
    """
    rows, n, m = schedule.actions, schedule.num_stages, schedule.n_microbatches
    sources = needs(n, schedule.copies)
    done = bytearray(3 * n * m)
    waiting: dict[int, int] = {}
    reached = [0] * len(rows)
    turns = deque(range(len(rows)))
    while turns:
        rank = turns.popleft()
        if reached[rank] == len(rows[rank]):
            continue
        inputs, outputs = [], []
        for action in rows[rank][reached[rank]].actions:
            stage, i = action.stage, action.microbatch
            if stage >= n or i >= m:
                raise ScheduleError(
                    f"every stage must be below {n} and every microbatch below {m}",
                    got=f"{action} (rank {rank}, step {reached[rank]})",
                    fix="call check(), which says what to change",
                )
            step = 3 * stage + KIND[action.op]
            outputs.append(step * m + i)
            for source in sources[step]:
                inputs.append(source * m + i)
        for key in inputs:
            if not done[key]:
                waiting[key] = rank
                break
        else:
            yield rank, inputs, outputs
            reached[rank] += 1
            turns.append(rank)
            for key in outputs:
                done[key] = 1
                if key in waiting:
                    turns.append(waiting.pop(key))
