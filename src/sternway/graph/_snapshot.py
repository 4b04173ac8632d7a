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
class ModuleSummary:
    """One module's nodes, and the bytes that they save; a storage is counted where it is first saved."""

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
    """An operation that uses a frozen parameter, and the trainable parameters that get gradients through it."""

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
    classes: tuple[tuple[str, str], ...] = ()  # each module's class, by its name; () without a model

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, from the node nearer to the loss to the node that made its input."""
        return tuple(
            Edge(node.id, position, *target)
            for node in self.nodes
            for position, target in enumerate(node.next)
            if target is not None
        )

    @property
    def saved(self) -> Iterator[Kept]:
        """Every saved tensor, in forward order."""
        return (Kept(node, saved) for node in self.nodes for saved in node.saved)

    @cached_property
    def _first_kept(self) -> dict[int, Kept]:
        """Each storage by its number, where it is first saved."""
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
        """Bytes saved for the backward: each storage once, without those of parameters and buffers."""
        return self._bytes("activation")

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters and buffers that the graph refers to; they are allocated with or without it."""
        return self._bytes("parameter", "buffer")

    def by_device(self) -> dict[str, int]:
        """``saved_bytes`` by device."""
        total: Counter[str] = Counter()
        for kept in self._first_kept.values():
            if kept.saved.role == "activation":
                total[kept.saved.tensor.device] += kept.saved.storage_nbytes
        return dict(total)

    def by_module(self, depth: int | None = None) -> dict[str, ModuleSummary]:
        """Nodes and bytes of each module, by name; names are cut to ``depth`` parts. No module is ""."""
        if depth is not None and depth < 0:
            raise GraphError(
                "depth must be 0 or more", got=str(depth), fix="pass a number of name parts, or None for all"
            )
        kinds: dict[str, Counter[str]] = {}
        total: Counter[str] = Counter()
        cut = {module: _cut(module, depth) for module in {node.module for node in self.nodes}}
        for node in self.nodes:
            kinds.setdefault(cut[node.module], Counter())[node.kind] += 1
        for kept in self._first_kept.values():
            if kept.saved.role == "activation":
                total[cut[kept.node.module]] += kept.saved.storage_nbytes
        return {
            name: ModuleSummary(name, sum(kinds[name].values()), total[name], tuple(kinds[name].most_common()))
            for name in sorted(kinds, key=natural_order)
        }

    def find(self, what: int | str | Node) -> list[Node]:
        """The nodes with an id, a parameter's name, a module's name or a kind; GraphError if there is none."""
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
                "a node must be given by its id, or by the name of a parameter, a module or a kind",
                got=repr(what),
                fix=f"pass an id below {len(self.nodes)}, or one of the names in by_module()",
            )
        return found

    def between(self, a: int | str | Node, b: int | str | Node) -> tuple[Node, ...]:
        """Every node on some path between ``a`` and ``b``, both included, in forward order."""
        return tuple(self.nodes[index] for index in between(self.nodes, _ids(self.find(a)), _ids(self.find(b))))

    def path(self, a: int | str | Node, b: int | str | Node) -> tuple[Node, ...]:
        """A shortest path from ``a`` to ``b``, along the gradient's flow or against it; empty if there is none."""
        return tuple(self.nodes[index] for index in shortest_path(self.nodes, _ids(self.find(a)), _ids(self.find(b))))

    def unused_parameters(self) -> tuple[str, ...]:
        """The model's parameters that require a gradient and get none from this graph."""
        return tuple(p.name for p in self._model() if p.requires_grad and p.node is None)

    def frozen_paths(self) -> tuple[FrozenUse, ...]:
        """The operations that use frozen parameters, and the trainable parameters that get gradients through each."""
        frozen = {p.name for p in self._model() if not p.requires_grad}
        uses = []
        for node in self.nodes:
            for name in dict.fromkeys(saved.of for saved in node.saved if saved.of in frozen):
                behind = between(self.nodes, {node.id}, {leaf.id for leaf in self.nodes if leaf.parameter})
                reached = tuple(self.nodes[index].parameter or "" for index in behind if self.nodes[index].parameter)
                uses.append(FrozenUse(str(name), node.id, node.module, reached))
        return tuple(uses)

    def largest_saved(self, n: int = 10) -> tuple[Kept, ...]:
        """The ``n`` largest storages that are saved, without those of parameters and buffers."""
        kept = [kept for kept in self._first_kept.values() if kept.saved.role == "activation"]
        return tuple(sorted(kept, key=lambda each: -each.saved.storage_nbytes)[:n])

    def shared_storages(self) -> dict[int, tuple[Kept, ...]]:
        """The storages that are saved more than once, by number."""
        uses: dict[int, list[Kept]] = {}
        for kept in self.saved:
            if kept.saved.storage is not None:
                uses.setdefault(kept.saved.storage, []).append(kept)
        return {number: tuple(kept) for number, kept in uses.items() if len(kept) > 1}

    def diff(self, other: Graph, depth: int | None = None) -> Diff:
        """What ``other`` has more and less than this graph, by module."""
        return compare(self.by_module(depth), other.by_module(depth))

    def split_preview(self) -> SplitPreview:
        """Which weight gradients ``sternway.split`` would compute in W, and which in I."""
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
        """Write one offline HTML file that shows the graph; with ``other``, also what changed from this graph to it."""
        from sternway import viewer
        from sternway.graph._json import to_record

        return viewer.write(path, title=title, graph=to_record(self), other=None if other is None else to_record(other))

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes, {self.saved_bytes:,} bytes saved, torch {self.torch})"

    def __str__(self) -> str:
        from sternway.graph._text import summary

        return "\n".join(summary(self))

    def _repr_html_(self) -> str:
        from sternway.graph._text import to_table

        return to_table(self)

    def _model(self) -> tuple[Parameter, ...]:
        if self.parameters is None:
            raise GraphError(
                "questions about a model's parameters need the model",
                got="a graph captured without one",
                fix="graph.capture(loss, model=model)",
            )
        return self.parameters


def _cut(module: str, depth: int | None) -> str:
    return module if depth is None else ".".join(module.split(".")[:depth])


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """``layers.10`` after ``layers.9``."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _ids(nodes: list[Node]) -> set[int]:
    return {node.id for node in nodes}
