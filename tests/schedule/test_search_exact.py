"""Tiny cases, against an integer program that knows nothing of the search: the optimum, and the bound below it."""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from sternway.schedule._clock import clock, peak_memory
from sternway.schedule._costs import Costs
from sternway.schedule._exact import branch_and_bound
from sternway.schedule._knobs import Knobs
from sternway.schedule._list_schedule import list_schedule
from sternway.schedule._lower_bound import lower_bound
from sternway.schedule._problem import place, pose
from sternway.schedule._search import search


def optimum(costs, *, ranks, microbatches, memory_limit, stages_per_rank=1):
    """Return the least longest span, by HiGHS.

    A variable for each start, one for each pair of steps on a rank whose order is open, and one for the span.
    Microbatches run in order, which costs nothing as they are alike; a rank's span counts from when its first F
    can start at the earliest, which is when a simulation starts it.
    """
    placement = place(ranks, stages_per_rank)
    stages = costs.per_stage(placement)
    num_stages = ranks * stages_per_rank
    rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
    steps = list(itertools.product(range(num_stages), "FIW", range(microbatches)))
    index = {step: i for i, step in enumerate(steps)}
    chain = {(s, "F"): s for s in range(num_stages)} | {
        (s, "I"): 2 * num_stages - 1 - s for s in range(num_stages)
    }

    def precedes(a, b):
        """Whether a comes before b in every plan: the same microbatch or an earlier one, and its turn is earlier."""
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
    horizon = sum(stages.of(op, s) for s, op, _ in steps) + 2 * num_stages * microbatches * stages.comm
    rows, least = [], []

    def at_least(bound, *terms):
        row = np.zeros(span + 1)
        for column, factor in terms:
            row[column] += factor
        rows.append(row)
        least.append(bound)

    def gap(a, b):
        if b[1] == "W" or a[1] == "W" or a[2] != b[2] or rank_of[a[0]] == rank_of[b[0]]:
            return 0.0
        return stages.comm if abs(chain[a[:2]] - chain[b[:2]]) == 1 else 0.0

    for a, b in itertools.permutations(steps, 2):
        neighbours = a[2] == b[2] and a[1] != "W" and b[1] != "W" and chain[b[:2]] - chain[a[:2]] == 1
        if neighbours or (rank_of[a[0]] == rank_of[b[0]] and precedes(a, b)):
            at_least(stages.of(a[1], a[0]) + gap(a, b), (index[b], 1), (index[a], -1))
    for (a, b), order in open_pairs.items():  # order is 1 where a is first
        at_least(stages.of(a[1], a[0]) - horizon, (index[b], 1), (index[a], -1), (order, -horizon))
        at_least(stages.of(b[1], b[0]), (index[a], 1), (index[b], -1), (order, horizon))
    for stage, op, i in steps:
        head = sum(
            stages.F[s] + (stages.comm if rank_of[s] != rank_of[s + 1] else 0)
            for s in range(min(placement[rank_of[stage]]))
        )
        at_least(stages.of(op, stage) - head, (span, 1), (index[stage, op, i], -1))
        if op == "F":
            amount, terms = memory_limit - stages.keeps[stage], []
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
    solved = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        bounds=Bounds(low, high),
        integrality=integrality,
        options={"mip_rel_gap": 1e-9},
    )
    assert solved.status == 0, solved.message
    return solved.fun
