"""A graph as text: a tree of modules for the terminal, a few lines for ``print``, a table for notebooks."""

from __future__ import annotations

from collections import Counter
from html import escape

from sternway._bytes import show_bytes
from sternway.graph._snapshot import Graph, natural_order

_KINDS = 4
_LARGEST = 3
_ROWS = 20


def summary(graph: Graph) -> list[str]:
    """The graph in a few lines: its size, its largest modules and saved tensors, what gets no gradient, the split."""
    lines = [_size(graph)]
    rows = sorted(graph.by_module().values(), key=lambda row: -row.saved_bytes)[:_LARGEST]
    if any(row.saved_bytes for row in rows):
        shown = [f"{row.module or '(no module)'} {show_bytes(row.saved_bytes)}" for row in rows if row.saved_bytes]
        lines.append(f"most saved by: {', '.join(shown)}")
    lines += _notes(graph)
    if graph.split.refused:
        lines.append(f"split: {graph.split}")
    elif graph.split.waits or graph.split.ready:
        waiting = sum(len(wait.parameters) for wait in graph.split.waits)
        lines.append(f"split: {waiting} parameters wait for W, {len(graph.split.ready)} are computed in I")
    return lines


def to_text(graph: Graph, depth: int | None = None) -> str:
    rows = graph.by_module(depth)
    names = {part for name in rows for part in _ancestors(name)}
    nodes: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for name, row in rows.items():
        for part in _ancestors(name):
            nodes[part] += row.nodes
            kept[part] += row.saved_bytes
    children: dict[str, list[str]] = {}
    for name in sorted(names - {""}, key=natural_order):
        children.setdefault(name.rpartition(".")[0], []).append(name)

    lines = [_size(graph)]
    if "" in rows:
        outside = rows[""]
        lines.append(
            f"outside modules: {outside.nodes} nodes, {show_bytes(outside.saved_bytes)}  {_kinds(outside.kinds)}"
        )
    stack = [(name, "", index == len(children[""]) - 1) for index, name in enumerate(children.get("", []))][::-1]
    while stack:
        name, indent, last = stack.pop()
        own = f"  {_kinds(rows[name].kinds)}" if name in rows else ""
        label = name.rpartition(".")[2]
        lines.append(f"{indent}{'└─' if last else '├─'} {label}: {nodes[name]} nodes, {show_bytes(kept[name])}{own}")
        below = children.get(name, [])
        deeper = indent + ("   " if last else "│  ")
        stack += [(child, deeper, index == len(below) - 1) for index, child in enumerate(below)][::-1]
    return "\n".join([*lines, *_notes(graph)])


def to_table(graph: Graph) -> str:
    """HTML for a notebook: the summary, and the modules that save most."""
    rows = sorted(graph.by_module().values(), key=lambda row: -row.saved_bytes)
    cells = [
        (row.module or "(no module)", f"{row.nodes:,}", show_bytes(row.saved_bytes), _kinds(row.kinds))
        for row in rows[:_ROWS]
    ]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = "".join(f"<th>{name}</th>" for name in ("module", "nodes", "saved", "kinds"))
    more = f"<p>{_ROWS} of {len(rows):,} modules</p>" if len(rows) > _ROWS else ""
    lines = "<br>".join(map(escape, summary(graph)))
    return f"<p>{lines}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _size(graph: Graph) -> str:
    return (
        f"{len(graph.nodes)} nodes, {show_bytes(graph.saved_bytes)} saved for the backward"
        f" (and {show_bytes(graph.parameter_bytes)} of parameters and buffers referred to), torch {graph.torch}"
    )


def _notes(graph: Graph) -> list[str]:
    """The largest saved tensors, and the parameters without a gradient."""
    lines = [f"  {kept}" for kept in graph.largest_saved(_LARGEST)]
    if lines:
        lines.insert(0, "largest:")
    if graph.parameters is not None and (unused := graph.unused_parameters()):
        lines.append(f"no gradient reaches: {', '.join(unused)}")
    return lines


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))] if name else [""]


def _kinds(kinds: tuple[tuple[str, int], ...]) -> str:
    shown = [kind.removesuffix("0").removesuffix("Backward") + (f"×{n}" if n > 1 else "") for kind, n in kinds[:_KINDS]]
    return ", ".join(shown) + (", …" if len(kinds) > _KINDS else "")
