"""The named schedules as starting points, so that no search is worse than one of them.

A whole backward is written as its I and its W, one after the other, and an overlapped pair as its two
actions: every action then ends no later than it did, and memory is the same.
"""

from collections.abc import Iterator

from sternway.errors import ScheduleError
from sternway.schedule._make import make
from sternway.schedule._problem import Problem, Words
from sternway.schedule._schedule import Schedule

_STRAIGHT = ("1f1b", "zb-h1", "zb-h2", "gpipe")
_VEE = ("zb-v", "v-half", "v-min", "dualpipe-v")
_LOOPED = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")


def named_words(problem: Problem) -> Iterator[Words]:
    """Yield the words of each named schedule that places its stages as this problem does."""
    stages_per_rank = problem.num_stages // problem.ranks
    for name in {1: _STRAIGHT, 2: _VEE}.get(stages_per_rank, _LOOPED):
        try:
            schedule = make(
                name, ranks=problem.ranks, microbatches=problem.microbatches, stages_per_rank=stages_per_rank
            )
        except ScheduleError:  # it does not exist for these numbers
            continue
        if schedule.placement == problem.placement:
            yield to_words(schedule)


def to_words(schedule: Schedule) -> Words:
    """Return a schedule's order as words: the inverse of ``to_schedule``, but for B and overlapped pairs."""
    words = []
    for steps in schedule.actions:
        word: list[int] = []
        for step in steps:
            for action in step.actions:
                kinds = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}[action.op]
                word.extend(3 * action.stage + kind for kind in kinds)
        words.append(word)
    return words
