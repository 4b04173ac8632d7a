"""The search's own simulation: the same times as ``simulate``, for words of integers, thousands of times.

A step starts when its rank is free and its input has arrived. Words fix the order of each rank, so one pass finds all
times: take a rank, run its steps until one waits for another rank, and take it up again when that input arrives.
"""

from dataclasses import dataclass

from sternway.schedule.search._problem import Problem, Words


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """What the search minimizes: the longest span of a rank, then the makespan, then the sum of all spans.

    Rounded to twelve digits, so that the order in which floats were added makes no difference.
    """

    span: float
    makespan: float
    total: float


@dataclass(frozen=True, slots=True)
class Times:
    """When every step of every word starts, and the score.

    ``places[step]`` has the positions of that step in its rank's word; ``worst`` is the rank with the longest span.
    """

    score: Score
    starts: list[list[float]]
    places: list[list[int]]
    worst: int


def clock(problem: Problem, words: Words) -> Times | None:
    """Return the times of these words, or None where ranks would wait for each other forever."""
    duration, feeds = problem.duration, problem.feeds
    arrivals: list[list[float]] = [[] for _ in duration]
    arrivals[0] = [0.0] * problem.microbatches
    places: list[list[int]] = [[] for _ in duration]
    free = [0.0] * problem.ranks
    starts: list[list[float]] = [[] for _ in words]
    awake = list(range(problem.ranks - 1, -1, -1))
    asleep = [False] * problem.ranks
    while awake:
        rank = awake.pop()
        word, begun, now = words[rank], starts[rank], free[rank]
        for position in range(len(begun), len(word)):
            step = word[position]
            inputs, place = arrivals[step], places[step]
            index = len(place)
            if index >= len(inputs):
                asleep[rank] = True  # until the step that delivers this input wakes it
                break
            place.append(position)
            if inputs[index] > now:
                now = inputs[index]
            begun.append(now)
            now += duration[step]
            for target, delay, other in feeds[step]:
                arrivals[target].append(now + delay)
                if asleep[other]:
                    asleep[other] = False
                    awake.append(other)
        free[rank] = now
    if any(len(begun) < len(word) for begun, word in zip(starts, words, strict=True)):
        return None
    spans = [end - begun[0] for end, begun in zip(free, starts, strict=True)]
    longest = max(spans)
    score = Score(*(float(f"{time:.12g}") for time in (longest, max(free), sum(spans))))
    return Times(score, starts, places, spans.index(longest))
