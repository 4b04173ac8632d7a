"""The search's own stopwatch: the same times as ``simulate``, over words of integers, for thousands of plans.

A step starts when its rank is free and its input is there. Words fix each rank's order, so one pass decides
all
times: take a rank, run its steps until one waits for another rank, and take that rank up again when it
    delivers.
"""

from dataclasses import dataclass

from sternway.schedule._problem import Problem, Words


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """What the search makes small: the longest busy span of a rank, then the makespan, then the sum of spans.

    Rounded to twelve digits, so that the order in which floats were added does not decide.
    """

    span: float
    makespan: float
    total: float


@dataclass(frozen=True, slots=True)
class Times:
    """When every step of every word starts, and what that scores.

    ``places[step]`` has the positions, in its rank's word, of that step's first, second, ... occurrence;
    ``worst`` is the rank with the longest span.
    """

    score: Score
    starts: list[list[float]]
    places: list[list[int]]
    worst: int


def clock(problem: Problem, words: Words) -> Times | None:
    """Return the times of these words, or None where the ranks would wait for each other forever."""
    duration, hop, rank_of = problem.duration, problem.hop, problem.rank_of
    top = problem.num_stages - 1
    arrivals: list[list[float]] = [[] for _ in duration]
    arrivals[0] = [0.0] * problem.microbatches
    places: list[list[int]] = [[] for _ in duration]
    free = [0.0] * problem.ranks
    starts: list[list[float]] = [[] for _ in words]
    awake = list(range(problem.ranks - 1, -1, -1))
    asleep = [False] * problem.ranks
    while awake:
        rank = awake.pop()
        asleep[rank] = True
        word, begun, now = words[rank], starts[rank], free[rank]
        for position in range(len(begun), len(word)):
            step = word[position]
            inputs, place = arrivals[step], places[step]
            index = len(place)
            if index >= len(inputs):
                break  # rank sleeps until the step that delivers this input wakes it
            place.append(position)
            if inputs[index] > now:
                now = inputs[index]
            begun.append(now)
            now += duration[step]
            stage, kind = divmod(step, 3)
            if kind == 0:
                if stage < top:
                    arrivals[step + 3].append(now + hop[stage])
                    target = rank_of[stage + 1]
                else:
                    arrivals[step + 1].append(now)
                    continue
            elif kind == 1:
                arrivals[step + 1].append(now)
                if stage == 0:
                    continue
                arrivals[step - 3].append(now + hop[stage - 1])
                target = rank_of[stage - 1]
            else:
                continue
            if asleep[target]:  # also this rank itself, to which nothing is lost by looking again
                asleep[target] = False
                awake.append(target)
        free[rank] = now
    if any(len(begun) < len(word) for begun, word in zip(starts, words, strict=True)):
        return None
    spans = [end - begun[0] for end, begun in zip(free, starts, strict=True)]
    longest = max(spans)
    score = Score(*(float(f"{time:.12g}") for time in (longest, max(free), sum(spans))))
    return Times(score, starts, places, spans.index(longest))


def peak_memory(problem: Problem, words: Words) -> float:
    """Return the most that any rank holds at once."""
    peak = 0.0
    change = (problem.keeps, problem.leaves - problem.keeps, -problem.leaves)
    for word in words:
        held = 0.0
        for step in word:
            held += change[step % 3]
            if held > peak:
                peak = held
    return peak
