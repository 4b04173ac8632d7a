"""``Graph``: a captured graph, and the questions one can ask of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sternway.errors import GraphError
from sternway.graph._diff import Diff, compare
from sternway.graph._records import Edge, Node, Parameter, Saved, SplitPreview
from sternway.graph._search import between, shortest_path


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module's share: its nodes, and the bytes that they keep, each storage counted where it is first kept."""

    module: str
    nodes: int
    saved_bytes: int
    kinds: tuple[tuple[str, int], ...]  # most frequent first


@dataclass(frozen=True, slots=True)
class Kept:
    """A saved tensor together with the node that saves it."""

    node: Node
    saved: Saved

    def __str__(self) -> str:
        return f"{self.saved.storage_nbytes:,} bytes: {self.saved.tensor} as {self.saved.name!r} of {self.node}"


@dataclass(frozen=True, slots=True)
class FrozenUse:
    """An operation that uses a frozen parameter, and the trainable ones that gradient reaches through it."""

    parameter: str
    node: int
    module: str
    leads_to: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A frozen snapshot of an autograd graph; ``capture`` makes one.

    Example:
        >>> from sternway import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> g = graph.capture(model(torch.ones(3, 4)).sum(), model)
        >>> for row in g.by_module().values():
        ...     print(row.module, row.nodes, row.saved_bytes)
         2 48
        0 4 48
        2 4 0
    """

    nodes: tuple[Node, ...]
    roots: tuple[tuple[int, int], ...]
    parameters: tuple[Parameter, ...] | None  # None: no model was given
    split: SplitPreview
    torch: str

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, from the node nearer the loss to the one further down."""
        return tuple(
            Edge(node.id, position, *target)
            for node in self.nodes
            for position, target in enumerate(node.next)
            if target is not None
        )

    @property
    def saved(self) -> Iterator[Kept]:
        """Everything kept, in forward order."""
        return (Kept(node, saved) for node in self.nodes for saved in node.saved)

    @cached_property
    def _first_kept(self) -> dict[int, Kept]:
        """Each storage by its number, where it is first kept."""
        first: dict[int, Kept] = {}
        for node in self.nodes:
            for saved in node.saved:
                if saved.storage is not None and saved.storage not in first:
                    first[saved.storage] = Kept(node, saved)
        return first

    def _bytes(self, *roles: str) -> int:
        return sum(kept.saved.storage_nbytes for kept in self._first_kept.values() if kept.saved.role in roles)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward: each storage once, parameters and buffers apart."""
        return self._bytes("activation")

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters and buffers that the graph refers to; they would be there without it."""
        return self._bytes("parameter", "buffer")

    def by_device(self) -> dict[str, int]:
        """``saved_bytes`` by device."""
        total: Counter[str] = Counter()
        for kept in self._first_kept.values():
            if kept.saved.role == "activation":
                total[kept.saved.tensor.device] += kept.saved.storage_nbytes
        return dict(total)

    def by_module(self, depth: int | None = None) -> dict[str, ModuleRow]:
        """Each module's share, by name; names cut to ``depth`` parts. What is outside every module is ""."""
        if depth is not None and depth < 0:
            raise GraphError("depth is a number of name parts", got=str(depth), fix="pass 0, 1, 2, … or None for all")
        kinds: dict[str, Counter[str]] = {}
        total: Counter[str] = Counter()
        cut = {module: _cut(module, depth) for module in {node.module for node in self.nodes}}
        for node in self.nodes:
            kinds.setdefault(cut[node.module], Counter())[node.kind] += 1
        for kept in self._first_kept.values():
            if kept.saved.role == "activation":
                total[cut[kept.node.module]] += kept.saved.storage_nbytes
        return {
            name: ModuleRow(name, sum(kinds[name].values()), total[name], tuple(kinds[name].most_common()))
            for name in sorted(kinds, key=_natural)
        }

    def find(self, what: int | str | Node) -> list[Node]:
        """The nodes meant by an id, a node, a parameter's name, a module's name or a kind; GraphError if none is."""
        if isinstance(what, Node):
            what = what.id
        if isinstance(what, int):
            found = [self.nodes[what]] if 0 <= what < len(self.nodes) else []
        else:
            found = (
                [node for node in self.nodes if node.parameter == what]
                or [node for node in self.nodes if node.module == what or node.module.startswith(f"{what}.")]
                or [node for node in self.nodes if node.kind == what]
            )
        if not found:
            raise GraphError(
                "a place in the graph is a node's id, or the name of a parameter, a module or a kind",
                got=repr(what),
                fix=f"an id below {len(self.nodes)}, or one of the names in by_module()",
            )
        return found

    def between(self, a: int | str | Node, b: int | str | Node) -> tuple[Node, ...]:
        """Every node on some way between ``a`` and ``b``, both included, in forward order."""
        return tuple(self.nodes[index] for index in between(self.nodes, _ids(self.find(a)), _ids(self.find(b))))

    def path(self, a: int | str | Node, b: int | str | Node) -> tuple[Node, ...]:
        """A shortest way from ``a`` to ``b``, along gradient's flow or against it; empty if there is none."""
        return tuple(self.nodes[index] for index in shortest_path(self.nodes, _ids(self.find(a)), _ids(self.find(b))))

    def unused_parameters(self) -> tuple[str, ...]:
        """The model's parameters that require a gradient and get none from this graph."""
        return tuple(p.name for p in self._model() if p.requires_grad and p.node is None)

    def frozen_paths(self) -> tuple[FrozenUse, ...]:
        """Where frozen parameters are used in the graph, and what gradient still has to reach through each place."""
        frozen = {p.name for p in self._model() if not p.requires_grad}
        uses = []
        for node in self.nodes:
            for name in dict.fromkeys(saved.of for saved in node.saved if saved.of in frozen):
                behind = between(self.nodes, {node.id}, {leaf.id for leaf in self.nodes if leaf.parameter})
                reached = tuple(self.nodes[index].parameter or "" for index in behind if self.nodes[index].parameter)
                uses.append(FrozenUse(str(name), node.id, node.module, reached))
        return tuple(uses)

    def largest_saved(self, n: int = 10) -> tuple[Kept, ...]:
        """The ``n`` largest storages that are kept, where each is first kept; parameters and buffers apart."""
        kept = [kept for kept in self._first_kept.values() if kept.saved.role == "activation"]
        return tuple(sorted(kept, key=lambda each: -each.saved.storage_nbytes)[:n])

    def shared_storages(self) -> dict[int, tuple[Kept, ...]]:
        """The storages kept in more than one place, with those places."""
        places: dict[int, list[Kept]] = {}
        for kept in self.saved:
            if kept.saved.storage is not None:
                places.setdefault(kept.saved.storage, []).append(kept)
        return {number: tuple(kept) for number, kept in places.items() if len(kept) > 1}

    def diff(self, other: Graph, depth: int | None = None) -> Diff:
        """What ``other`` has more and less than this, by module."""
        return compare(self.by_module(depth), other.by_module(depth))

    def split_preview(self) -> SplitPreview:
        """What ``sternway.split`` would leave to W, and what it would compute in I, had the graph been split."""
        return self.split

    def to_json(self) -> str:
        """The graph as JSON, in the format of docs/graph_json.md; ``from_json`` reads it back."""
        from sternway.graph._json import to_json

        return to_json(self)

    def to_dot(self) -> str:
        """The graph in Graphviz's language, a cluster for each module."""
        from sternway.graph._dot import to_dot

        return to_dot(self)

    def to_networkx(self) -> Any:
        """A ``networkx.MultiDiGraph`` with the nodes' fields as attributes; needs networkx."""
        from sternway.graph._dot import to_networkx

        return to_networkx(self)

    def to_text(self, depth: int | None = None) -> str:
        """The modules as a tree, with nodes and bytes, for a terminal."""
        from sternway.graph._text import to_text

        return to_text(self, depth)

    def to_html(self, path: str | Path, *, title: str = "Autograd graph", other: Graph | None = None) -> Path:
        """Write one offline HTML file that shows the graph; with ``other``, what changed from this to that too."""
        from sternway import viewer
        from sternway.graph._json import to_record

        return viewer.write(path, title=title, graph=to_record(self), other=None if other is None else to_record(other))

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes, {self.saved_bytes:,} bytes saved, torch {self.torch})"

    def _model(self) -> tuple[Parameter, ...]:
        if self.parameters is None:
            raise GraphError(
                "a question about a model's parameters needs the model",
                got="a graph captured without one",
                fix="graph.capture(loss, model=model)",
            )
        return self.parameters


def _cut(module: str, depth: int | None) -> str:
    return module if depth is None else ".".join(module.split(".")[:depth])


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """``layers.10`` after ``layers.9``."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _ids(nodes: list[Node]) -> set[int]:
    return {node.id for node in nodes}
