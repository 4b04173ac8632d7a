"""A graph for the terminal: the modules as a tree, with their nodes and the bytes they keep."""

from __future__ import annotations

from collections import Counter

from sternway.graph._snapshot import Graph, _natural

_KINDS = 4


def shown_bytes(count: int) -> str:
    """``1.5 MiB``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


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
    for name in sorted(names - {""}, key=_natural):
        children.setdefault(name.rpartition(".")[0], []).append(name)

    lines = [
        f"{len(graph.nodes)} nodes, {shown_bytes(graph.saved_bytes)} saved for the backward"
        f" (and {shown_bytes(graph.parameter_bytes)} of parameters and buffers referred to), torch {graph.torch}"
    ]
    if "" in rows:
        outside = rows[""]
        lines.append(
            f"outside modules: {outside.nodes} nodes, {shown_bytes(outside.saved_bytes)}  {_kinds(outside.kinds)}"
        )
    stack = [(name, "", index == len(children[""]) - 1) for index, name in enumerate(children.get("", []))][::-1]
    while stack:
        name, indent, last = stack.pop()
        own = f"  {_kinds(rows[name].kinds)}" if name in rows else ""
        label = name.rpartition(".")[2]
        lines.append(f"{indent}{'└─' if last else '├─'} {label}: {nodes[name]} nodes, {shown_bytes(kept[name])}{own}")
        below = children.get(name, [])
        deeper = indent + ("   " if last else "│  ")
        stack += [(child, deeper, index == len(below) - 1) for index, child in enumerate(below)][::-1]
    largest = graph.largest_saved(3)
    if largest:
        lines += ["largest:", *(f"  {kept}" for kept in largest)]
    if graph.parameters is not None and (unused := graph.unused_parameters()):
        lines.append(f"no gradient reaches: {', '.join(unused)}")
    return "\n".join(lines)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))] if name else [""]


def _kinds(kinds: tuple[tuple[str, int], ...]) -> str:
    shown = [kind.removesuffix("0").removesuffix("Backward") + (f"×{n}" if n > 1 else "") for kind, n in kinds[:_KINDS]]
    return ", ".join(shown) + (", …" if len(kinds) > _KINDS else "")
