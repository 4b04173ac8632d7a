"""The order in which to read a tree: how important each file is, and which files import each other in cycles.

Importance is PageRank over imports that run when a module is imported: Page et al., "The PageRank Citation Ranking"
(1999). A file is important if important files import it.
"""

from __future__ import annotations

from collections.abc import Mapping

_DAMPING = 0.85
_ROUNDS = 60


def importance(graph: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The rank of each file, from ``{file: files that it imports}``.

    Example:
        >>> share = importance({"main": ("base",), "other": ("base",), "base": ()})
        >>> max(share, key=share.get)
        'base'
    """
    files = sorted(graph)
    index = {path: number for number, path in enumerate(files)}
    targets = [[index[path] for path in graph[file]] for file in files]
    share = [1.0 / max(len(files), 1)] * len(files)
    for _ in range(_ROUNDS):
        idle = sum(value for value, out in zip(share, targets, strict=True) if not out)
        base = (1.0 - _DAMPING + _DAMPING * idle) / max(len(files), 1)
        following = [base] * len(files)
        for value, out in zip(share, targets, strict=True):
            for target in out:
                following[target] += _DAMPING * value / len(out)
        share = following
    return dict(zip(files, share, strict=True))


def cycles(graph: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Groups of files that all reach each other (Tarjan's algorithm, without recursion), the largest first.

    Example:
        >>> cycles({"a": ("b",), "b": ("a",), "c": ("a",)})
        [('a', 'b')]
    """
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()
    found: list[tuple[str, ...]] = []
    for root in sorted(graph):
        if root in number:
            continue
        work = [(root, iter(graph[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        waiting.add(root)
        while work:
            file, following = work[-1]
            for target in following:
                if target not in number:
                    number[target] = low[target] = len(number)
                    stack.append(target)
                    waiting.add(target)
                    work.append((target, iter(graph[target])))
                    break
                if target in waiting:
                    low[file] = min(low[file], number[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[file])
                if low[file] == number[file]:
                    group = []
                    while True:
                        member = stack.pop()
                        waiting.discard(member)
                        group.append(member)
                        if member == file:
                            break
                    if len(group) > 1 or file in graph[file]:
                        found.append(tuple(sorted(group)))
    return sorted(found, key=lambda group: (-len(group), group))


def shortest_cycle(graph: Mapping[str, tuple[str, ...]], group: tuple[str, ...]) -> tuple[str, ...]:
    """A shortest cycle inside a group that starts and ends at its first file."""
    start, inside = group[0], set(group)
    before: dict[str, str] = {}
    ring = [start]
    while ring:
        following = []
        for file in ring:
            for target in graph[file]:
                if target == start:
                    way = [file]
                    while way[-1] != start:
                        way.append(before[way[-1]])
                    return (*reversed(way), start)
                if target in inside and target not in before:
                    before[target] = file
                    following.append(target)
        ring = following
    return (start, start)
