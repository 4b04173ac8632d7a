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
shop problem", 1996). Where no move is left, it starts again from the best plan, shaken a little. All draws
have a fixed seed: the same plan always comes out.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator

from sternway.schedule._clock import Times, clock
from sternway.schedule._problem import EPSILON, Problem, Words

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
        if made is None:  # nowhere to go: start again beside the best
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
        if forbidden.get(_name(rank, moved), 0) > turn or not _sound(problem, moved, source, target):
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
    """Return the plan after a few moves of any steps over a short way."""
    for _ in range(_SHAKES):
        rank = draw.randrange(problem.ranks)
        last = len(words[rank]) - 1
        source = draw.randint(0, last)
        target = min(last, max(0, source + draw.choice((-3, -2, -1, 1, 2, 3))))
        moved = _moved(words[rank], source, target)
        if _sound(problem, moved, source, target):
            trial = [*words[:rank], moved, *words[rank + 1 :]]
            after = clock(problem, trial)
            if after is not None:
                words, times = trial, after
    return words, times


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
