"""What could be recomputed: all sets of stages if there are few, and else those in which ranks do alike."""

from collections.abc import Iterator
from itertools import combinations, product

from sternway.schedule._costs import Placement

Choice = tuple[int, ...]

_ALL = 8  # stages


def are_all(placement: Placement) -> bool:
    """Return whether ``choices`` has every set of these stages."""
    return sum(map(len, placement)) <= _ALL


def choices(placement: Placement) -> list[Choice]:
    """Return what could be recomputed, from nothing to everything.

    Example:
        >>> choices(((0,), (1,)))
        [(), (0,), (1,), (0, 1)]
    """
    count = sum(map(len, placement))
    if are_all(placement):
        return [choice for size in range(count + 1) for choice in combinations(range(count), size)]
    found = {(): None, tuple(range(count)): None} | dict.fromkeys(_alike(placement))
    return sorted(found, key=lambda choice: (len(choice), choice))


def _alike(placement: Placement) -> Iterator[Choice]:
    """Yield choices in which the first ranks recompute stages in the same places, such as their first one."""
    places = range(max(map(len, placement)))
    some = [
        [place for place, yes in zip(places, which, strict=True) if yes]
        for which in product((False, True), repeat=min(len(places), 4))
        if len(places) <= 4
    ] or [[place] for place in places]
    for ranks in range(1, len(placement) + 1):
        for which in [*some, list(places)]:
            held = [sorted(stages) for stages in placement[:ranks]]
            yield tuple(sorted(stages[place] for stages in held for place in which if place < len(stages)))
