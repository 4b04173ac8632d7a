"""What could be recomputed: every share of every stage if that is not much, and else what ranks do alike."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

from sternway.schedule._again import NOTHING, Recompute, Share, shares
from sternway.schedule._costs import Costs, Placement

_ALL = 2**8


def are_all(placement: Placement, costs: Costs) -> bool:
    """Return whether ``choices`` has every share of these stages."""
    return math.prod(len(each) for each in _levels(placement, costs)) <= _ALL


def choices(placement: Placement, costs: Costs) -> list[Recompute]:
    """Return what could be recomputed, from nothing to everything.

    Example:
        >>> choices(((0,), (1,)), Costs())
        [(), (0,), (1,), (0, 1)]
        >>> choices(((0,),), Costs(blocks=2))
        [(), ((0, 0.5),), (0,)]
    """
    each = _levels(placement, costs)
    count = len(each)
    if are_all(placement, costs):
        found = {_choice(enumerate(chosen)): None for chosen in product(*each)}
    else:
        found = {(): None, everything(costs, count): None} | dict.fromkeys(_alike(placement, each))
    return sorted(found, key=lambda choice: (len(choice), amount(choice), [*shares(choice)]))


def everything(costs: Costs, num_stages: int) -> Recompute:
    """Return all stages that can be recomputed."""
    return tuple(stage for stage, some in enumerate(costs.levels(num_stages)) if some)


def amount(choice: Recompute) -> Share:
    """Return how much is recomputed, in stages."""
    each = shares(choice).values()
    return Share(math.fsum(share.whole for share in each), math.fsum(share.selective for share in each))


def _levels(placement: Placement, costs: Costs) -> list[tuple[Share, ...]]:
    """Return for each stage the shares that can be recomputed, from none on."""
    return [(NOTHING, *some) for some in costs.levels(sum(map(len, placement)))]


def _choice(chosen: Iterator[tuple[int, Share]]) -> Recompute:
    return tuple(share.of(stage) for stage, share in chosen if share != NOTHING)


def _alike(placement: Placement, each: Sequence[Sequence[Share]]) -> Iterator[Recompute]:
    """Yield choices in which the first ranks recompute as much of stages in the same places, such as their first."""
    places = range(max(map(len, placement)))
    some = [
        [place for place, yes in zip(places, which, strict=True) if yes]
        for which in product((False, True), repeat=min(len(places), 4))
        if len(places) <= 4
    ] or [[place] for place in places]
    steps = sorted({share for shares_of in each for share in shares_of if share != NOTHING})
    for ranks in range(1, len(placement) + 1):
        for which, most in product([*some, list(places)], steps):
            held = [sorted(stages) for stages in placement[:ranks]]
            chosen = sorted(stages[place] for stages in held for place in which if place < len(stages))
            yield _choice((stage, max(share for share in each[stage] if share <= most)) for stage in chosen)
