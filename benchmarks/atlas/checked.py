"""Claims whose truth is a relation between files: cut lists, tests that reach definitions, excerpts, layers."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict

import networkx
from claims import Claims
from truth import Truth

_CALLS, _LISTED, _INHERITED, _RAISED = 8, 60, 20, 4  # where the pages cut their lists
_BRIEF = ("decorator", "definition", "signature", "test")  # with training calls, what a page may leave out: it says so
Set = set[tuple[object, ...]]


class Checked:
    """Which claims are right and which are missing, where that is more than a comparison of two sets."""

    def __init__(self, truth: Truth, said: Claims) -> None:
        self.truth, self.said = truth, said
        claims = truth.claims
        self.calls = Counter((path, name) for path, name, _, _ in claims["called at"])
        self.importers = Counter(path for path, _ in claims["imported by"])
        self.subclasses = Counter((path, name) for path, name, _, _ in claims["subclassed by"])
        claims["number of calls"] = {(*place, count) for place, count in self.calls.items()}
        claims["number of importers"] = set(self.importers.items())
        claims["layer"] = self._layers()
        claims["brief page"] = said["brief page"]
        claims["name on a brief page"] = {
            (path, name, line) for path, _, name, line in claims["definition"] if (path,) in said["brief page"]
        } & said["name on a brief page"]
        self.tests: dict[tuple[str, int], set[tuple[str, str]]] = {}
        for path, file in truth.files.items():
            if path.rpartition("/")[2].startswith("test_") or path.endswith(("_test.py", "conftest.py")):
                for name, line in file.tests:
                    self.tests[name, line] = self.tests.get((name, line), set()) | truth.reached((path, name))
        named = {
            place
            for path, file in truth.files.items()
            for place in ((path, name) for name in file.names | file.variables)
        }
        every: set[tuple[str, str]] = set().union(*self.tests.values())
        claims["reached by a test"] = {  # type: ignore[misc]
            (path, name)
            for path, name in every & named
            if not _is_test(path) and (path, name.removesuffix(".__init__")) not in every - {(path, name)}
        }
        said["reached by a test"] = {claim[:2] for claim in said["test reaches"]}
        self.at = defaultdict(set)
        for path, name, by, line in claims["called at"]:
            self.at[path, name, by].add(line)

    def _layers(self) -> Set:
        graph: networkx.DiGraph = networkx.DiGraph()
        graph.add_nodes_from(self.truth.files)
        graph.add_edges_from((path, target) for path, file in self.truth.files.items() for target in file.imports)
        groups = networkx.condensation(graph)
        level: dict[int, int] = {}
        for one in reversed(list(networkx.topological_sort(groups))):
            level[one] = 1 + max((level[below] for below in groups.successors(one)), default=0)
        found: Set = set()
        highest = max(level.values(), default=0)
        for one, members in groups.nodes(data="members"):
            down = sum(len(groups.nodes[below]["members"]) for below in networkx.descendants(groups, one))
            up = sum(len(groups.nodes[above]["members"]) for above in networkx.ancestors(groups, one))
            beside = len(members) - 1
            if down + up + beside:
                found |= {(path, level[one], highest, down + beside, up + beside) for path in members}
        return found

    def right(self, kind: str, found: Set, equal: Set) -> Set:
        """The claims that are true."""
        if kind == "identifier or word":
            return equal | (found & self.truth.allowed)
        if kind == "inherited member":
            return {claim for claim in found if self._inherits(claim)}
        if kind == "test reaches":
            return {claim for claim in found if claim[:2] in self.tests.get(claim[2:], ())}  # type: ignore[call-overload]
        if kind == "usage excerpt":
            return {claim for claim in found if self._quotes(claim)}
        if kind == "performance: loop in a hot path":
            return {claim for claim in found if self._is_hot(claim)}
        return equal

    def missing(self, kind: str, wanted: Set, absent: Set) -> Set:
        """The true claims that are not made, of lists that are not cut, and of pages that do not say they are brief."""
        if kind in _BRIEF or kind.startswith("training: "):
            absent = {claim for claim in absent if claim[:1] not in self.said["brief page"]}
        if kind == "called at":
            return {claim for claim in absent if self.calls[claim[0], claim[1]] <= _CALLS}  # type: ignore[index]
        if kind == "imported by":
            return {claim for claim in absent if self.importers[claim[0]] <= _LISTED}  # type: ignore[index]
        if kind == "subclassed by":
            return {claim for claim in absent if self.subclasses[claim[0], claim[1]] <= _LISTED}  # type: ignore[index]
        if kind == "performance: loop in a hot path":
            said = {claim[:2] for claim in self.said[kind]}
            return {claim for claim in wanted if claim not in said}
        if kind == "raises":  # said of functions without a docstring, in tables
            said = {claim[:2] for claim in self.said["raises"]}
            count = Counter(claim[:2] for claim in wanted)
            return {claim for claim in absent if claim[:2] in said and count[claim[:2]] < _RAISED}
        return absent

    def _inherits(self, claim: tuple[object, ...]) -> bool:
        path, owner, base, member = map(str, claim)
        own = self.truth.files[path].members.get(owner, set())
        places = [place for place in self.truth.ancestors(path, owner) if place[1] == base]
        return member not in own and any(member in self.truth.files[one].members.get(name, ()) for one, name in places)

    def _is_hot(self, claim: tuple[object, ...]) -> bool:
        path, name, line, callee, loop, by, at = claim
        place = (str(path), str(name))
        return (line, callee, loop) in self.truth.loops.get(place, ()) and (by, at) in self.truth.hot.get(place, ())

    def _quotes(self, claim: tuple[object, ...]) -> bool:
        path, name, by, line, text = claim
        first, count = int(str(line)), str(text).count("\n") + 1
        quoted = textwrap.dedent("\n".join(self.truth.files[str(by)].text[first - 1 : first - 1 + count]))
        return quoted == text and any(first <= at < first + count for at in self.at[path, name, by])


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
