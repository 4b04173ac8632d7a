"""Tiny cases against an integer program that knows nothing of the search: the optimum, and a bound below."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from sternway.schedule import Action, Costs, Share, lower_bound, search
from sternway.schedule._again import NOTHING
from sternway.schedule.search._clock import clock
from sternway.schedule.search._exact import branch_and_bound
from sternway.schedule.search._list_schedule import Priorities, list_schedule
from sternway.schedule.search._lower_bound import bound
from sternway.schedule.search._problem import place, pose
from sternway.schedule.search._words import fits


def optimum(costs, *, ranks, microbatches, memory_limit, stages_per_rank=1, works=None):
    """Return the least longest span, by HiGHS; ``works`` is what I of each stage takes while it runs.

    A variable for each start, one for each pair of steps on a rank whose order is open, and one for the span.
    Microbatches run in order, which costs nothing as they are alike; a rank's span counts from when its
    first F can start at the earliest, which is when a simulation starts it.
    """
    placement = place(ranks, stages_per_rank)
    stages = costs.per_stage(placement)
    num_stages = ranks * stages_per_rank
    rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
    steps = list(itertools.product(range(num_stages), "FIW", range(microbatches)))
    index = {step: i for i, step in enumerate(steps)}
    chain = {(s, "F"): s for s in range(num_stages)} | {(s, "I"): 2 * num_stages - 1 - s for s in range(num_stages)}

    def precedes(a, b):
        """Whether a comes before b in every plan: no later a microbatch, and an earlier turn."""
        if a[2] > b[2] or a == b:
            return False
        if a[:2] == b[:2]:
            return True
        if a[1] == "W":
            return False
        if b[1] == "W":
            return chain[a[:2]] <= chain[b[0], "I"]
        return chain[a[:2]] < chain[b[:2]]

    open_pairs = {}
    for a, b in itertools.combinations(steps, 2):
        if rank_of[a[0]] == rank_of[b[0]] and not precedes(a, b) and not precedes(b, a):
            open_pairs[a, b] = len(steps) + len(open_pairs)
    span = len(steps) + len(open_pairs)
    horizon = sum(stages.of(op, s) for s, op, _ in steps) + 2 * num_stages * microbatches * max(map(max, stages.comm))
    rows, least = [], []

    def at_least(bound, *terms):
        row = np.zeros(span + 1)
        for column, factor in terms:
            row[column] += factor
        rows.append(row)
        least.append(bound)

    def gap(a, b):
        if b[1] == "W" or a[1] == "W" or a[2] != b[2] or abs(chain[a[:2]] - chain[b[:2]]) != 1:
            return 0.0
        return stages.comm[rank_of[a[0]]][rank_of[b[0]]]

    for a, b in itertools.permutations(steps, 2):
        neighbours = a[2] == b[2] and a[1] != "W" and b[1] != "W" and chain[b[:2]] - chain[a[:2]] == 1
        if neighbours or (rank_of[a[0]] == rank_of[b[0]] and precedes(a, b)):
            at_least(stages.of(a[1], a[0]) + gap(a, b), (index[b], 1), (index[a], -1))
    for (a, b), order in open_pairs.items():  # order is 1 where a is first
        at_least(stages.of(a[1], a[0]) - horizon, (index[b], 1), (index[a], -1), (order, -horizon))
        at_least(stages.of(b[1], b[0]), (index[a], 1), (index[b], -1), (order, horizon))
    for stage, op, i in steps:
        head = sum(stages.F[s] + stages.comm[rank_of[s]][rank_of[s + 1]] for s in range(min(placement[rank_of[stage]])))
        at_least(stages.of(op, stage) - head, (span, 1), (index[stage, op, i], -1))
        if op == "F" or (op == "I" and works is not None):
            amount, terms = memory_limit - (stages.keeps[stage] if op == "F" else works[stage]), []
            for other in steps:
                if rank_of[other[0]] != rank_of[stage] or other == (stage, op, i):
                    continue
                keeps, leaves = stages.keeps[other[0]], stages.keeps_after_i[other[0]]
                change = {"F": keeps, "I": leaves - keeps, "W": -leaves}[other[1]]
                me = (stage, op, i)
                if precedes(other, me):
                    amount -= change
                elif (other, me) in open_pairs:
                    terms.append((open_pairs[other, me], -change))
                elif (me, other) in open_pairs:
                    amount -= change
                    terms.append((open_pairs[me, other], change))
            at_least(-amount - 1e-7, *terms)
    low, high = np.zeros(span + 1), np.full(span + 1, horizon)
    integrality = np.zeros(span + 1)
    integrality[len(steps) : span] = 1
    high[len(steps) : span] = 1
    objective = np.zeros(span + 1)
    objective[span] = 1
    for presolve in (True, False):  # with steps that take no time, HiGHS's presolve sometimes fails
        solved = milp(
            objective,
            constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
            bounds=Bounds(low, high),
            integrality=integrality,
            options={"mip_rel_gap": 1e-9, "presolve": presolve},
        )
        if solved.status == 0:
            break
    assert solved.status == 0, solved.message
    return solved.fun


EVEN = Costs(F=1.0, I=1.0, W=1.0)
SHORT_W = Costs(F=2.0, I=1.5, W=0.5, comm=0.5, memory_after_I=0.4)
LONG_W = Costs(F=1.0, I=1.0, W=2.0, comm=0.25, memory_after_I=0.0)


def uneven(stages: int) -> Costs:
    return Costs(
        F=[(1.0, 2.0, 0.5, 1.5)[s % 4] for s in range(stages)],
        I=[(2.0, 1.0, 1.5, 0.5)[s % 4] for s in range(stages)],
        W=[(0.5, 0.75, 2.0, 1.0)[s % 4] for s in range(stages)],
        comm=0.25,
        memory_after_I=0.5,
    )


def far(stages: int) -> Costs:
    """Each direction between two ranks has a time of its own."""
    comm = [[0.0 if a == b else 0.25 + 0.5 * a + 0.125 * b for b in range(stages)] for a in range(stages)]
    return Costs(F=1.0, I=1.5, W=0.75, comm=comm, memory_after_I=0.5)


@pytest.mark.parametrize("memory_limit", [1, 1.5, 2, 3, 6])
@pytest.mark.parametrize(
    "costs", [EVEN, SHORT_W, LONG_W, uneven, far], ids=["even", "short-w", "long-w", "uneven", "far"]
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 3), (2, 4), (3, 3), (3, 4)])
def test_search_finds_the_optimum_and_the_bound_is_not_above_it(ranks, microbatches, costs, memory_limit):
    costs = costs(ranks) if callable(costs) else costs
    numbers = {"ranks": ranks, "microbatches": microbatches, "memory_limit": memory_limit}
    least = optimum(costs, **numbers)
    timeline = search(costs, **numbers).check().simulate(costs)
    assert timeline.span == pytest.approx(least, rel=1e-5)
    assert timeline.peak_memory <= memory_limit + 1e-9
    assert lower_bound(costs, **numbers) <= least * (1 + 1e-5)


@pytest.mark.parametrize("memory_limit", [1, 1.5, 2])
@pytest.mark.parametrize("costs", [EVEN, SHORT_W, uneven], ids=["even", "short-w", "uneven"])
def test_the_optimum_in_a_v(costs, memory_limit):
    costs = costs(4) if callable(costs) else costs
    numbers = {"ranks": 2, "microbatches": 2, "memory_limit": memory_limit, "stages_per_rank": 2}
    least = optimum(costs, **numbers)
    timeline = search(costs, **numbers).check().simulate(costs)
    assert timeline.span == pytest.approx(least, rel=1e-5)
    assert lower_bound(costs, **numbers) <= least * (1 + 1e-5)


def recomputed(costs, choice, ranks):
    """Costs in which I of the chosen stages is some of F and a whole backward; and what it takes meanwhile.

    ``choice`` is the share of each stage.
    """
    plain = costs.per_stage(place(ranks, 1))
    chosen = [share != NOTHING for share in choice]
    small = costs.per_stage(place(ranks, 1), range(ranks)).keeps
    cheap = costs.memory_selective or 0.0
    inputs = [
        kept - share.whole * (kept - least) - share.selective * (kept - cheap)
        for kept, least, share in zip(plain.keeps, small, choice, strict=True)
    ]

    def pick(others, values):
        return [other if yes else value for yes, other, value in zip(chosen, others, values, strict=True)]

    again = [share.whole * f + share.selective * f / 5 for share, f in zip(choice, plain.F, strict=True)]
    longer = [some + b for some, b in zip(again, plain.B, strict=True)]
    works = [whole - kept for whole, kept in zip(plain.keeps, inputs, strict=True)]
    nothing = [0.0] * ranks
    made = Costs(
        F=plain.F,
        I=pick(longer, plain.I),
        W=pick(nothing, plain.W),
        comm=costs.comm,
        memory_after_F=pick(inputs, plain.keeps),
        memory_after_I=pick(nothing, plain.keeps_after_i),
    )
    return made, pick(works, nothing)


@pytest.mark.parametrize("memory_limit", [1.1, 1.5, 2.2])
@pytest.mark.parametrize("costs", [EVEN, SHORT_W, uneven], ids=["even", "short-w", "uneven"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 3)])
def test_the_best_choice_of_what_to_recompute(ranks, microbatches, costs, memory_limit):
    costs = replace(costs(ranks) if callable(costs) else costs, memory_input=0.1)
    numbers = {"ranks": ranks, "microbatches": microbatches, "memory_limit": memory_limit}
    compare_all_choices(costs, (NOTHING, Share(1.0)), **numbers)


@pytest.mark.parametrize(("costs", "memory_limit"), [(EVEN, 1.5), (SHORT_W, 1.3), (uneven, 1.6)])
def test_the_best_choice_of_how_many_blocks_to_recompute(costs, memory_limit):
    costs = replace(costs(2) if callable(costs) else costs, memory_input=0.1, blocks=2)
    levels = (NOTHING, Share(0.5), Share(1.0))
    compare_all_choices(costs, levels, ranks=2, microbatches=3, memory_limit=memory_limit)


@pytest.mark.parametrize(("costs", "memory_limit"), [(EVEN, 1.3), (EVEN, 1.7), (SHORT_W, 1.3), (uneven, 1.5)])
def test_the_best_choice_of_what_to_recompute_selectively(costs, memory_limit):
    costs = replace(costs(2) if callable(costs) else costs, memory_input=0.1, memory_selective=0.6, blocks=2)
    levels = (NOTHING, Share(0, 0.5), Share(0, 1.0), Share(0.5, 0.5), Share(1.0))
    assert costs.levels(2) == (levels[1:],) * 2
    compare_all_choices(costs, levels, ranks=2, microbatches=3, memory_limit=memory_limit)


def compare_all_choices(costs, levels, *, ranks, **numbers):
    """The search finds no worse than the best of all choices, if backwards are whole where something is recomputed."""
    spans = {}
    for choice in itertools.product(levels, repeat=ranks):
        made, works = recomputed(costs, choice, ranks)
        spans[choice] = optimum(made, ranks=ranks, **numbers, works=works)
        shares = [share.of(stage) for stage, share in enumerate(choice) if share != NOTHING]
        assert lower_bound(costs, ranks=ranks, **numbers, recompute=shares) <= spans[choice] * (1 + 1e-5)
    found = search(costs, ranks=ranks, **numbers, recompute="auto")
    found.check(memory_limit=numbers["memory_limit"], costs=costs)
    assert found.simulate(costs).span <= min(spans.values()) * (1 + 1e-5)
    if all(isinstance(step, Action) and step.op in "FB" for stage in found.shares for step in found.actions[stage]):
        chosen = tuple(found.shares.get(stage, NOTHING) for stage in range(ranks))
        assert found.simulate(costs).span == pytest.approx(spans[chosen], rel=1e-5)


def test_branch_and_bound_says_when_it_is_certain():
    problem = pose(SHORT_W, ranks=4, microbatches=6, memory_limit=2.5)
    words = list_schedule(problem, Priorities((1, 1, 1, 1), 1.0, forward_first=False))
    times = clock(problem, words)
    cut = branch_and_bound(problem, words, times, goal=0.0, nodes=5)
    assert not cut.certain
    assert cut.times.score == times.score
    whole = branch_and_bound(problem, words, times, goal=0.0, nodes=100_000)
    assert whole.certain
    assert bound(problem) <= whole.times.score.span < times.score.span
    assert fits(problem, whole.words)
