"""The layers of a tree by its imports: a file is above every file that it imports; files in a cycle share a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class FileLayer(NamedTuple):
    """A file's layer (1 imports nothing of the tree), and how many files it reaches and is reached by."""

    layer: int = 0
    layers: int = 0
    reaches: int = 0
    reached_by: int = 0


def layers(graph: Mapping[str, tuple[str, ...]], groups: tuple[tuple[str, ...], ...]) -> dict[str, FileLayer]:
    """The layer of each file. ``groups``: the import cycles.

    Example:
        >>> layers({"app": ("core",), "core": ("base",), "base": ()}, ())["core"]
        FileLayer(layer=2, layers=3, reaches=1, reached_by=1)
    """
    head = {path: group[0] for group in groups for path in group}
    whole: dict[str, set[str]] = {head.get(path, path): set() for path in graph}
    members: dict[str, int] = {}
    for path, targets in graph.items():
        one = head.get(path, path)
        members[one] = members.get(one, 0) + 1
        whole[one] |= {head.get(target, target) for target in targets} - {one}
    order = _bottom_up(whole)
    number = {one: index for index, one in enumerate(order)}
    level: dict[str, int] = {}
    below: dict[str, int] = {}  # bit sets
    for one in order:
        level[one] = 1 + max((level[target] for target in whole[one]), default=0)
        bits = 0
        for target in whole[one]:
            bits |= below[target] | 1 << number[target]
        below[one] = bits
    above = dict.fromkeys(order, 0)
    for one in reversed(order):
        for target in whole[one]:
            above[target] |= above[one] | 1 << number[one]
    highest = max(level.values(), default=0)
    weights = [members[one] for one in order]
    counts = {one: (_count(below[one], weights), _count(above[one], weights), members[one] - 1) for one in order}
    made = {}
    for path in graph:
        one = head.get(path, path)
        down, up, beside = counts[one]
        made[path] = FileLayer(level[one], highest, down + beside, up + beside)
    return made


def _bottom_up(whole: Mapping[str, set[str]]) -> list[str]:
    """Every node after all that it leads to; the graph has no cycles."""
    done: dict[str, None] = {}
    for root in sorted(whole):
        stack = [(root, iter(sorted(whole[root])))]
        while stack:
            one, following = stack[-1]
            if one in done:
                stack.pop()
                continue
            target = next((target for target in following if target not in done), None)
            if target is None:
                done[one] = None
                stack.pop()
            else:
                stack.append((target, iter(sorted(whole[target]))))
    return list(done)


def _count(bits: int, weights: list[int]) -> int:
    total, text = 0, bin(bits)[:1:-1]
    start = text.find("1")
    while start >= 0:
        total += weights[start]
        start = text.find("1", start + 1)
    return total
