"""Plans of the search as schedules, and back; and what they hold."""

from sternway.schedule._action import OPS, Action
from sternway.schedule._costs import EPSILON
from sternway.schedule._depends import KIND
from sternway.schedule._schedule import Schedule
from sternway.schedule.search._problem import Problem, Words


def to_schedule(problem: Problem, words: Words, name: str) -> Schedule:
    """Return words as a schedule, with numbered microbatches; B instead of I and W where backwards are whole."""
    counts = [0] * (3 * problem.num_stages)
    lines = []
    for word in words:
        line = []
        for step in word:
            stage, op = step // 3, OPS[step % 3]
            if stage not in problem.whole:
                line.append(Action(stage, op, counts[step]))
            elif op != "W":
                line.append(Action(stage, "F" if op == "F" else "B", counts[step]))
            counts[step] += 1
        lines.append(tuple(line))
    return Schedule(name, problem.microbatches, problem.placement, tuple(lines), problem.recompute)


def to_words(schedule: Schedule) -> Words:
    """Return a schedule's order as words, with each B as I and W, and each overlapped pair as its two actions.

    Every action then ends no later than it did, and memory is the same.
    """
    words = []
    for steps in schedule.actions:
        word: list[int] = []
        for action in (action for step in steps for action in step.actions):
            step = 3 * action.stage + KIND[action.op]
            word += (step, step + 1) if action.op == "B" else (step,)
        words.append(word)
    return words


def peaks(problem: Problem, words: Words) -> list[float]:
    """Return the most that each rank holds at once."""
    change, found = problem.change, []
    for word in words:
        held = peak = 0.0
        for step in word:
            held += change[step]
            if held > peak:
                peak = held
        found.append(peak)
    return found


def fits(problem: Problem, words: Words) -> bool:
    """Return whether no rank ever holds more than its limit."""
    return all(peak <= limit + EPSILON for peak, limit in zip(peaks(problem, words), problem.limit, strict=True))
