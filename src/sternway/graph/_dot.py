"""A graph for other tools: Graphviz's language, and networkx."""

from __future__ import annotations

from typing import Any

from sternway._bytes import show_bytes
from sternway.errors import GraphError
from sternway.graph._records import Node
from sternway.graph._snapshot import Graph


def to_dot(graph: Graph) -> str:
    by_module: dict[str, list[Node]] = {}
    for node in graph.nodes:
        by_module.setdefault(node.module, []).append(node)
    lines = ["digraph autograd {", "  node [shape=box];"]
    for number, (module, nodes) in enumerate(by_module.items()):
        inside = [f"  n{node.id} [label={_quoted(_label(node))}];" for node in nodes]
        if module:
            inside = [
                f"  subgraph cluster{number} {{",
                f"    label={_quoted(module)};",
                *("  " + line for line in inside),
                "  }",
            ]
        lines += inside
    lines += [f"  n{edge.source} -> n{edge.target};" for edge in graph.edges]
    return "\n".join([*lines, "}", ""])


def _label(node: Node) -> str:
    kept = sum(saved.nbytes for saved in node.saved if saved.role == "activation")
    shape = ", ".join(map(str, node.outputs))
    return "\n".join(
        part for part in (node.kind, node.parameter or "", shape, show_bytes(kept) if kept else "") if part
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def to_networkx(graph: Graph) -> Any:
    try:
        import networkx  # type: ignore[import-untyped,import-not-found,unused-ignore]  # optional, without stubs
    except ImportError as error:
        raise GraphError(
            "to_networkx needs networkx", got="an environment without it", fix="pip install networkx"
        ) from error
    made = networkx.MultiDiGraph(torch=graph.torch)
    for node in graph.nodes:
        made.add_node(node.id, **{key: value for key, value in node._asdict().items() if key not in ("id", "next")})
    for edge in graph.edges:
        made.add_edge(edge.source, edge.target, input=edge.input, output=edge.output)
    return made
