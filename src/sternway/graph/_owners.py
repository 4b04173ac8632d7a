"""Which module a node belongs to, where ``record`` did not tag it.

[1] A leaf belongs to its parameter's module, and so do the nodes between it and the operation that uses it.
[2] An operation that uses parameters of a module belongs to that module; if it uses parameters of several modules, to
    the innermost module that contains them.
[3] Any other node belongs to the innermost module that contains the nearest owned nodes before and after it in the
    forward. So the activation between ``mlp.up`` and ``mlp.down`` belongs to ``mlp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class OwnerHint(NamedTuple):
    """What is known of a node when its module is looked for."""

    next: Sequence[tuple[int, int] | None]
    parameter: str | None = None  # the name, for the leaf of a parameter
    recorded: str | None = None  # the module, in a recorded graph


def around(one: str, other: str) -> str:
    """The innermost module that contains both, or is one of them."""
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


def owners(hints: Sequence[OwnerHint]) -> list[str]:
    """The module of each node; nodes are in forward order."""
    side = [False] * len(hints)  # whether a single parameter is all that a node leads to
    owner: list[str | None] = [None] * len(hints)
    below: list[str | None] = [None] * len(hints)  # the nearest owner before it in the forward
    for index, (following, parameter, recorded) in enumerate(hints):
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
                    nearest = max(nearest, child)  # the latest, of several
                elif (found := owner[child]) is not None:
                    weights.append(found)
        side[index] = nearest < 0 and len(following) == 1 and following[0] is not None
        owner[index] = recorded if recorded is not None else _around_all(weights) if weights else None
        if nearest >= 0:
            below[index] = owner[nearest] if owner[nearest] is not None else below[nearest]

    above: list[str | None] = [None] * len(hints)
    for index in range(len(hints) - 1, -1, -1):
        mine = owner[index] if owner[index] is not None else above[index]
        if mine is not None:
            for target in hints[index].next:
                if target is not None:
                    above[target[0]] = mine  # overwritten by earlier nodes, which are nearer
    return [
        found if (found := owner[index]) is not None else _between(above[index], below[index])
        for index in range(len(hints))
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
