"""Improve a plan by moving single steps on its critical path: a tabu search.

The longest span is caused by a chain of steps, each waiting for the one before it. On one rank the chain is a block of
steps without a gap. It enters the block at its first step, with an input that arrives, and leaves it at its last, with
a result that another rank waits for. Steps in between that could be elsewhere make the chain longer, so the moves that
are tried take a step out of the block: before its first step or after its last.

    rank 1   .. [I F W I] ..      W is between the I that arrives and the I that rank 0 waits for
    rank 1   .. [I F I W] ..      after the block it does not lengthen the chain

The best move tried is made even if the plan gets worse, and undoing it is forbidden for a while, so that the search
leaves local minima (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996). Where no
move is left, it starts again from the best plan after a few random moves. The random seed is fixed, so the same plan
always gives the same result.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator

from sternway.schedule._costs import EPSILON
from sternway.schedule._depends import needs
from sternway.schedule.search._clock import Times, clock
from sternway.schedule.search._problem import Problem, Words

_SAMPLE = 12
_TENURE = 10
_SHAKES = 6


def improve(problem: Problem, words: Words, times: Times, *, goal: float, tries: int) -> tuple[Words, Times]:
    """Return words at least as good, after about ``tries`` timed moves; stops early at a span of ``goal``."""
    draw = random.Random(0)
    best = (words, times)
    forbidden: dict[tuple[int, int], int] = {}
    turn = 0
    while tries > 0 and best[1].score.span > goal:
        turn += 1
        moves = list(_moves(problem, words, times))
        draw.shuffle(moves)
        made, timed = _best_move(problem, words, times, moves, forbidden, turn)
        tries -= max(1, timed)
        if made is None:  # no move is left: start again near the best
            words, times = _shaken(problem, *best, draw)
            tries -= _SHAKES
            continue
        rank, words_after, times = made
        forbidden[_name(rank, words[rank])] = turn + _TENURE + draw.randrange(_TENURE)
        words = words_after
        if times.score < best[1].score:
            best = (words, times)
    return best


def _best_move(
    problem: Problem,
    words: Words,
    times: Times,
    moves: list[tuple[int, int, int]],
    forbidden: dict[tuple[int, int], int],
    turn: int,
) -> tuple[tuple[int, Words, Times] | None, int]:
    """Return the first move that helps, or the best of a few; and how many were timed."""
    made: tuple[int, Words, Times] | None = None
    timed = 0
    for rank, source, target in moves:
        moved = _moved(words[rank], source, target)
        if forbidden.get(_name(rank, moved), 0) > turn or not _sound(problem, rank, moved, source, target):
            continue
        trial = [*words[:rank], moved, *words[rank + 1 :]]
        timed += 1
        after = clock(problem, trial)
        if after is not None and (made is None or after.score < made[2].score):
            made = (rank, trial, after)
            if after.score < times.score:
                break
        if timed >= _SAMPLE:
            break
    return made, timed


def _shaken(problem: Problem, words: Words, times: Times, draw: random.Random) -> tuple[Words, Times]:
    """Return the plan after a few random moves over short distances."""
    for _ in range(_SHAKES):
        rank = draw.randrange(problem.ranks)
        last = len(words[rank]) - 1
        source = draw.randint(0, last)
        target = min(last, max(0, source + draw.choice((-3, -2, -1, 1, 2, 3))))
        moved = _moved(words[rank], source, target)
        if _sound(problem, rank, moved, source, target):
            trial = [*words[:rank], moved, *words[rank + 1 :]]
            after = clock(problem, trial)
            if after is not None:
                words, times = trial, after
    return words, times


def _name(rank: int, word: list[int]) -> tuple[int, int]:
    """Return the key of a rank's word in the list of forbidden ones."""
    return rank, hash(tuple(word))


def _moved(word: list[int], source: int, target: int) -> list[int]:
    """Return the word with one step taken out and put back at ``target``."""
    rest = word[:source] + word[source + 1 :]
    rest.insert(target, word[source])
    return rest


def _sound(problem: Problem, rank: int, word: list[int], source: int, target: int) -> bool:
    """Return whether a rank's word, after a move, still runs F, I and W in order and fits in memory."""
    low, high = min(source, target), max(source, target)
    before = word[:low]
    steps = {step for stage in {step // 3 for step in word} for step in range(3 * stage, 3 * stage + 3)}
    counts = {step: before.count(step) for step in steps}
    change, limit = problem.change, problem.limit[rank] + EPSILON
    held = sum(count * change[step] for step, count in counts.items())
    for step in word[low : high + 1]:
        kind = step % 3
        counts[step] += 1
        held += change[step]
        if held > limit or (kind and counts[step] > counts[step - 1]):
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
    sources = needs(problem.num_stages)
    rank = times.worst
    last = position = len(words[rank]) - 1
    while True:
        word, begun = words[rank], starts[rank]
        while position and begun[position - 1] + duration[word[position - 1]] >= begun[position] - EPSILON:
            position -= 1
        yield rank, position, last
        step = word[position]
        if not sources[step]:  # the first stage's F
            return
        source = sources[step][0]
        rank = problem.rank_of[source // 3]
        last = position = places[source][bisect_left(places[step], position)]
