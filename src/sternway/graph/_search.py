"""Paths through a captured graph. A node's targets have smaller ids, so one pass in order of id is enough."""

from __future__ import annotations

from collections import deque

from sternway.graph._records import Node


def between(nodes: tuple[Node, ...], ones: set[int], others: set[int]) -> list[int]:
    """The ids on some path from one set to the other, whichever of the two is nearer to the loss."""
    found = _on_paths(nodes, ones, others) | _on_paths(nodes, others, ones)
    return sorted(found)


def _on_paths(nodes: tuple[Node, ...], top: set[int], bottom: set[int]) -> set[int]:
    low, high = min(bottom), max(top)
    reaches = [False] * (high + 1)
    for index in range(low, high + 1):
        reaches[index] = index in bottom or any(target and reaches[target[0]] for target in nodes[index].next)
    found: set[int] = set()
    reached = [False] * (high + 1)
    for index in range(high, low - 1, -1):
        if reaches[index] and (index in top or reached[index]):
            found.add(index)
            for target in nodes[index].next:
                if target:
                    reached[target[0]] = True
    return found


def shortest_path(nodes: tuple[Node, ...], starts: set[int], ends: set[int]) -> list[int]:
    """The ids from one of ``starts`` to one of ``ends``, along the edges or against them; empty if there is no path."""
    along = _breadth_first(nodes, starts, ends)
    return along or _breadth_first(nodes, ends, starts)[::-1]


def _breadth_first(nodes: tuple[Node, ...], starts: set[int], ends: set[int]) -> list[int]:
    came_from: dict[int, int | None] = dict.fromkeys(sorted(starts, reverse=True))
    queue = deque(came_from)
    while queue:
        index = queue.popleft()
        if index in ends:
            path: list[int] = []
            step: int | None = index
            while step is not None:
                path.append(step)
                step = came_from[step]
            return path[::-1]
        for target in nodes[index].next:
            if target is not None and target[0] not in came_from:
                came_from[target[0]] = index
                queue.append(target[0])
    return []
