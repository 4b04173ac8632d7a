"""Mend a plan where it hurts: move single steps on its critical path, as long as that helps.

The longest span has a reason: a chain of steps, each waiting for the one before it. On one rank the chain is a
block of steps without a gap; it enters the block at its first step, with something that arrives, and leaves it
from its last, with something that another rank waits for. Whatever stands between the two and could stand outside
makes the chain longer than it need be, so the moves tried are: out of the block, before its first step or behind
its last. (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996, show that no
other moves can help; memory and W make our blocks longer than theirs, so steps of each kind are tried.)

    rank 1   .. [I F W I] ..      W stands between the I that arrives and the I that rank 0 waits for:
    rank 1   .. [I F I W] ..      behind the block it costs the chain nothing
"""

from collections.abc import Iterator

from sternway.schedule._clock import Times, clock
from sternway.schedule._problem import EPSILON, Problem, Words


def improve(problem: Problem, words: Words, times: Times, *, goal: float, tries: int) -> tuple[Words, Times]:
    """Return words at least as good, after at most ``tries`` timed moves; stops early at a span of ``goal``."""
    while tries > 0 and times.score.span > goal:
        for rank, source, target in _moves(problem, words, times):
            word = words[rank]
            moved = _moved(word, source, target)
            if not _sound(problem, moved, min(source, target), max(source, target)):
                continue
            trial = [*words[:rank], moved, *words[rank + 1 :]]
            tries -= 1
            timed = clock(problem, trial)
            if timed is not None and timed.score < times.score:
                words, times = trial, timed
                break
            if tries <= 0:
                break
        else:
            break
    return words, times


def _moved(word: list[int], source: int, target: int) -> list[int]:
    """Return the word with one step taken out and put back at ``target``."""
    rest = word[:source] + word[source + 1 :]
    rest.insert(target, word[source])
    return rest


def _sound(problem: Problem, word: list[int], low: int, high: int) -> bool:
    """Return whether one rank's word keeps its own order and memory, looking at what a move can have changed."""
    counts = dict.fromkeys((s for stage in sorted({w // 3 for w in word}) for s in range(3 * stage, 3 * stage + 3)), 0)
    held = 0.0
    change = (problem.keeps, problem.leaves - problem.keeps, -problem.leaves)
    for position, step in enumerate(word):
        if position > high:
            return True
        kind = step % 3
        counts[step] += 1
        held += change[kind]
        if position >= low:
            if held > problem.limit + EPSILON:
                return False
            if kind and counts[step] > counts[step - 1]:
                return False
    return True


def _moves(problem: Problem, words: Words, times: Times) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, from, to) for the steps that lengthen the critical path's blocks."""
    for rank, first, last in _blocks(problem, words, times):
        if first == last:
            continue
        word = words[rank]
        seen = set()
        for position in range(last - 1, first - 1, -1):  # behind the block: the nearest of each kind
            if word[position] not in seen and word[position] != word[last]:
                seen.add(word[position])
                yield rank, position, last
        seen.clear()
        for position in range(first + 1, last + 1):  # before the block
            if word[position] not in seen and word[position] != word[first]:
                seen.add(word[position])
                yield rank, position, first


def _blocks(problem: Problem, words: Words, times: Times) -> list[tuple[int, int, int]]:
    """Return the critical path's blocks as (rank, first position, last position), latest first."""
    places = _places(problem, words)
    starts, duration = times.starts, problem.duration
    rank = times.worst
    last = position = len(words[rank]) - 1
    blocks = []
    while True:
        start = starts[rank][position]
        if position:
            before = position - 1
            if starts[rank][before] + duration[words[rank][before]] >= start - EPSILON:
                position = before
                continue
        blocks.append((rank, position, last))
        source = _source(problem, words[rank][position])
        if source < 0:
            return blocks
        index = places[words[rank][position]].index(position)
        rank = problem.rank_of[source // 3]
        last = position = places[source][index]


def _source(problem: Problem, step: int) -> int:
    """Return the step on another rank, or stage, that this kind of step waits for; -1 where there is none."""
    stage, kind = divmod(step, 3)
    if kind == 0:
        return step - 3
    if kind == 1 and stage + 1 < problem.num_stages:
        return step + 3
    return step - 1


def _places(problem: Problem, words: Words) -> list[list[int]]:
    """Return, for each kind of step, the positions of its first, second, ... in its rank's word."""
    places: list[list[int]] = [[] for _ in problem.duration]
    for word in words:
        for position, step in enumerate(word):
            places[step].append(position)
    return places
