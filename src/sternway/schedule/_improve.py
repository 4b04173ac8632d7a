"""Mend a plan where it hurts: move single steps on its critical path, and do not turn back.

The longest span has a reason: a chain of steps, each waiting for the one before it. On one rank the chain
is a block of steps without a gap; it enters the block at its first step, with something that arrives, and
leaves it from its last, with something that another rank waits for. Whatever stands between the two and
could stand outside makes the chain longer than it need be, so the moves tried are: out of the block, before
its first step or behind its last.

    rank 1   .. [I F W I] ..      W stands between the I that arrives and the I that rank 0 waits for:
    rank 1   .. [I F I W] ..      behind the block it costs the chain nothing

The best move tried is made even if it makes the plan worse, and what it undoes is forbidden for a while, so
that the search climbs out of dead ends (Nowicki and Smutnicki, "A fast taboo search algorithm for the job
shop problem", 1996). The draws that vary the order of trying have a fixed seed: the same plan always comes
out.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator

from sternway.schedule._clock import Times, clock
from sternway.schedule._problem import EPSILON, Problem, Words

_SAMPLE = 12
_TENURE = 10


def improve(problem: Problem, words: Words, times: Times, *, goal: float, tries: int) -> tuple[Words, Times]:
    """Return words at least as good, after about ``tries`` timed moves; stops early at a span of ``goal``."""
    draw = random.Random(0)
    best = (words, times)
    forbidden: dict[tuple[int, int], int] = {}
    round_ = 0
    while tries > 0 and best[1].score.span > goal:
        round_ += 1
        moves = list(_moves(problem, words, times))
        draw.shuffle(moves)
        made: tuple[Words, Times, int] | None = None
        timed = 0
        for rank, source, target in moves:
            moved = _moved(words[rank], source, target)
            if forbidden.get(_name(rank, moved), 0) > round_ or not _sound(problem, moved, source, target):
                continue
            trial = [*words[:rank], moved, *words[rank + 1 :]]
            timed += 1
            after = clock(problem, trial)
            if after is not None and (made is None or after.score < made[1].score):
                made = (trial, after, rank)
                if after.score < times.score:
                    break
            if timed >= _SAMPLE:
                break
        tries -= max(1, timed)
        if made is None:
            break
        forbidden[_name(made[2], words[made[2]])] = round_ + _TENURE + draw.randrange(_TENURE)
        words, times = made[0], made[1]
        if times.score < best[1].score:
            best = (words, times)
    return best


def _name(rank: int, word: list[int]) -> tuple[int, int]:
    """Return what to remember a rank's word by."""
    return rank, hash(tuple(word))


def _moved(word: list[int], source: int, target: int) -> list[int]:
    """Return the word with one step taken out and put back at ``target``."""
    rest = word[:source] + word[source + 1 :]
    rest.insert(target, word[source])
    return rest


def _sound(problem: Problem, word: list[int], source: int, target: int) -> bool:
    """Return whether a rank's word keeps its own order and memory, where a move has changed it."""
    low, high = min(source, target), max(source, target)
    before = word[:low]
    steps = {step for stage in {step // 3 for step in word} for step in range(3 * stage, 3 * stage + 3)}
    counts = {step: before.count(step) for step in steps}
    change = (problem.keeps, problem.leaves - problem.keeps, -problem.leaves)
    held = sum(count * change[step % 3] for step, count in counts.items())
    for step in word[low : high + 1]:
        kind = step % 3
        counts[step] += 1
        held += change[kind]
        if held > problem.limit + EPSILON or (kind and counts[step] > counts[step - 1]):
            return False
    return True


def _moves(problem: Problem, words: Words, times: Times) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, from, to) for steps that lengthen the critical path's blocks: the nearest of each."""
    for rank, first, last in _blocks(problem, words, times):
        word = words[rank]
        seen = {word[last]}
        for position in range(last - 1, first - 1, -1):
            if word[position] not in seen:
                seen.add(word[position])
                yield rank, position, last
        seen = {word[first]}
        for position in range(first + 1, last + 1):
            if word[position] not in seen:
                seen.add(word[position])
                yield rank, position, first


def _blocks(problem: Problem, words: Words, times: Times) -> Iterator[tuple[int, int, int]]:
    """Yield the critical path's blocks as (rank, first position, last position), latest first."""
    starts, places, duration = times.starts, times.places, problem.duration
    rank = times.worst
    last = position = len(words[rank]) - 1
    while True:
        word, begun = words[rank], starts[rank]
        while position and begun[position - 1] + duration[word[position - 1]] >= begun[position] - EPSILON:
            position -= 1
        yield rank, position, last
        step = word[position]
        source = _source(problem, step)
        if source < 0:
            return
        rank = problem.rank_of[source // 3]
        last = position = places[source][bisect_left(places[step], position)]


def _source(problem: Problem, step: int) -> int:
    """Return the step that this one's input comes from; negative for the first stage's F, which has none."""
    stage, kind = divmod(step, 3)
    if kind == 1 and stage + 1 < problem.num_stages:
        return step + 3
    return step - 1 if kind else step - 3
