"""Where definitions are used: call sites that read well, tests that reach them, and calls from inside loops."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from sternway.atlas._records import Call, Facts
from sternway.atlas.relate._resolve import Symbol

TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$")
_EXAMPLE = re.compile(r"(^|/)(examples?|demos?|tutorials?|samples?)(/|$)")
_LONGEST = 10  # lines of an excerpt
_SITES = 2  # excerpts of one definition
_TESTS = 4  # tests listed for one definition, the nearest first
_FAR = 6  # calls from a test to a definition


class UsageSite(NamedTuple):
    """A statement that calls a definition."""

    path: str
    first: int
    last: int


class ReachingTest(NamedTuple):
    """A test that reaches a definition through ``calls`` calls; ``through`` is the definition it calls before that."""

    path: str
    name: str
    line: int
    calls: int
    through: str


Place = tuple[str, str]  # a definition: path, name
Sites = Mapping[Place, list[tuple[str, Call]]]


def sites_of(facts: Mapping[str, Facts], resolved: Mapping[str, list[Symbol | None]]) -> Sites:
    """The calls of each definition."""
    found: dict[Place, list[tuple[str, Call]]] = defaultdict(list)
    for path, known in facts.items():
        for call, symbol in zip(known.calls, resolved[path], strict=True):
            if symbol is not None and symbol.name:
                found[symbol.path, symbol.name].append((path, call))
    return found


def examples(sites: Sites) -> dict[str, list[tuple[str, tuple[UsageSite, ...]]]]:
    """For each file, its definitions with the call sites to show: examples first, then tests, short ones first."""
    found: dict[str, list[tuple[str, tuple[UsageSite, ...]]]] = defaultdict(list)
    for (owner, name), calls in sites.items():
        if owner.startswith("?") or name.rpartition(".")[2].startswith("_"):
            continue
        good = {
            (_rank(path, owner), call.last - call.first, path, call.first, call.last)
            for path, call in calls
            if call.first and call.last - call.first < _LONGEST and path != owner
        }
        chosen: dict[str, UsageSite] = {}
        for _, _, path, first, last in sorted(good):
            if path not in chosen and len(chosen) < _SITES:
                chosen[path] = UsageSite(path, first, last)
        if chosen:
            found[owner].append((name, tuple(chosen.values())))
    return found


def _rank(path: str, owner: str) -> int:
    if _EXAMPLE.search(path):
        return 0
    if TEST_FILE.search(path):
        return 1
    return 2


def tests(facts: Mapping[str, Facts], sites: Sites) -> dict[str, list[tuple[str, tuple[ReachingTest, ...]]]]:
    """For each file, its definitions with the nearest tests that reach them through calls.

    One search from all tests at once. A definition takes up to four tests and passes them on, so the whole costs at
    most four times the number of calls.
    """
    callees: dict[Place, dict[Place, None]] = defaultdict(dict)
    for place, calls in sites.items():
        for path, call in calls:
            if call.scope and (path, call.scope) != place:
                callees[path, call.scope][place] = None
    for path, known in facts.items():
        for item in known.definitions:
            owner, _, last = item.name.rpartition(".")
            if last == "__init__" and owner:  # calling a class calls it
                callees[path, owner][path, item.name] = None
    reached: dict[Place, dict[Place, ReachingTest]] = defaultdict(dict)
    ring: list[tuple[Place, ReachingTest]] = []
    for path, known in sorted(facts.items()):
        if TEST_FILE.search(path):
            for fact in known.facts:
                if fact.section == "testing" and fact.kind == "test":
                    ring.append(((path, fact.text), ReachingTest(path, fact.text, fact.line, 0, "")))
    for distance in range(1, _FAR + 1):
        following: list[tuple[Place, ReachingTest]] = []
        for place, test in ring:
            through = place[1] if distance > 1 else ""
            for target in callees.get(place, ()):
                found, key = reached[target], (test.path, test.name)
                if key not in found and len(found) < _TESTS and target != key:
                    found[key] = test._replace(calls=distance, through=through)
                    following.append((target, found[key]))
        ring = following
    made: dict[str, list[tuple[str, tuple[ReachingTest, ...]]]] = defaultdict(list)
    for (path, name), found in reached.items():
        if not TEST_FILE.search(path):
            made[path].append((name, tuple(sorted(found.values(), key=lambda test: (test.calls, test)))))
    return made


def hot(sites: Sites) -> dict[str, list[tuple[str, str, int]]]:
    """For each file, its definitions that another place calls inside a loop: name, path and line of the first call."""
    found: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for (owner, name), calls in sites.items():
        inside = sorted((path, call.line) for path, call in calls if call.loop and (path, call.scope) != (owner, name))
        if inside:
            found[owner].append((name, *inside[0]))
    return found
