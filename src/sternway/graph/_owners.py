"""Which module a node belongs to, where no recorder wrote it down.

[1] A leaf belongs to its parameter's module, and so does whatever lies between it and the operation that uses it.
[2] An operation that uses parameters of a module belongs to it (of several, to the module around them).
[3] Any other belongs to the module around the nearest owners above it and below it in the order of the forward, so
    that the activation between ``mlp.up`` and ``mlp.down`` is ``mlp``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """As much of a node as says where it belongs."""

    next: Sequence[tuple[int, int] | None]
    parameter: str | None = None  # of a leaf that is one
    recorded: str | None = None  # the module, where a recorder wrote it down


def around(one: str, other: str) -> str:
    """The innermost module that both are, or are in."""
    if one == other:
        return one
    if other.startswith(one) and (not one or other[len(one)] == "."):
        return one
    shared = []
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            break
        shared.append(mine)
    return ".".join(shared)


def owners(places: Sequence[Place]) -> list[str]:
    """The module of each place, in order; places come after all that they lead to."""
    side = [False] * len(places)  # on the parameters' side of an operation: nothing but one parameter lies behind it
    owner: list[str | None] = [None] * len(places)
    below: list[str | None] = [None] * len(places)  # the nearest owner further down
    for index, (following, parameter, recorded) in enumerate(places):
        if not following:
            side[index] = parameter is not None
            owner[index] = parameter.rpartition(".")[0] if parameter else None
            continue
        nearest = -1
        weights = []
        for target in following:
            if target is not None:
                child = target[0]
                if not side[child]:
                    nearest = max(nearest, child)  # the latest made, of several
                elif (found := owner[child]) is not None:
                    weights.append(found)
        side[index] = nearest < 0 and len(following) == 1 and following[0] is not None
        owner[index] = recorded if recorded is not None else _around_all(weights) if weights else None
        if nearest >= 0:
            below[index] = owner[nearest] if owner[nearest] is not None else below[nearest]

    above: list[str | None] = [None] * len(places)
    for index in range(len(places) - 1, -1, -1):
        mine = owner[index] if owner[index] is not None else above[index]
        if mine is not None:
            for target in places[index].next:
                if target is not None:
                    above[target[0]] = mine  # the last to write is the earliest made, and so the nearest
    return [
        found if (found := owner[index]) is not None else _between(above[index], below[index])
        for index in range(len(places))
    ]


def _around_all(modules: list[str]) -> str:
    found = modules[0]
    for module in modules[1:]:
        found = around(found, module)
    return found


def _between(above: str | None, below: str | None) -> str:
    if above is None or below is None:
        return ""  # before the first module, or after the last: the loss
    return around(above, below)
