"""What the compiler made of a module: three graphs, what crosses between them, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sternway._torch.compile import OpOverload, example_value, size_hint
from sternway.split.compiled._ops import flops, is_costly, nbytes


@dataclass(frozen=True, slots=True)
class CompiledNode:
    """One node of a compiled graph, in the order in which it runs."""

    name: str
    op: str  # "aten.mm"; "input" for what comes from outside
    inputs: tuple[str, ...]  # by name
    shape: tuple[int, ...] | None  # None for several tensors, or none
    dtype: str
    device: str
    nbytes: int
    flops: int
    costly: bool  # a product, a convolution, a table: what is worth deferring


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """F, I or W."""

    name: str
    nodes: tuple[CompiledNode, ...]  # inputs are among them
    code: str  # as readable Python, with shapes

    @property
    def operations(self) -> int:
        """How many nodes are operations, not inputs."""
        return sum(node.op != "input" for node in self.nodes)

    @property
    def flops(self) -> int:
        """Floating-point operations, by torch's formulas for products, convolutions and attention."""
        return sum(node.flops for node in self.nodes)


@dataclass(frozen=True, slots=True)
class CompiledGraphs:
    """The three graphs of one compiled region, and the bytes that go between them.

    A value of F that both I and W need counts in ``f_to_i`` and in ``f_to_w``. Parameters are not counted. Sizes that
    vary count as they were when the region was compiled.
    """

    F: CompiledGraph
    I: CompiledGraph  # noqa: E741 - the half's name everywhere here
    W: CompiledGraph
    f_to_i: int
    f_to_w: int
    i_to_w: int  # with the weight gradients that I has computed, and output gradients that W needs
    held_after_f: int
    early: int  # weight gradients that I computes
    late: int  # those that W computes

    @property
    def held_after_i(self) -> int:
        """Bytes held between I and W."""
        return self.f_to_w + self.i_to_w

    def to_record(self) -> dict[str, Any]:
        """The three as one graph, in the format that the viewer draws (docs/graph_json.md)."""
        tensors: dict[tuple[Any, str, str], int] = {}
        numbers: dict[str, int] = {}
        nodes: list[dict[str, Any]] = []
        for graph in (self.F, self.I, self.W):
            for node in graph.nodes:
                if node.op == "input" and node.name in numbers:
                    continue  # what an earlier graph made
                inputs = [numbers[name] for name in node.inputs]
                kind = tensors.setdefault((node.shape, node.dtype, node.device), len(tensors))
                numbers[node.name] = len(nodes)
                record = {"kind": node.op, "sequence": len(nodes), "outputs": [kind], "module": graph.name}
                record["inputs"] = [nodes[number]["outputs"][0] for number in inputs]
                record["next"] = [[number, 0] for number in inputs]
                nodes.append(record)
        waits = [
            {"node": numbers[node.name], "kind": node.op, "module": "W", "parameters": []}
            for node in self.W.nodes
            if node.costly
        ]
        return {
            "format": "sternway.graph",
            "version": 1,
            "torch": torch.__version__,
            "saved_bytes": self.held_after_f,
            "roots": [[len(nodes) - 1, 0]],
            "nodes": nodes,
            "parameters": None,
            "split": {"waits": waits, "ready": [], "refused": None},
            "tensors": [list(kind) for kind in tensors],
        }

    def to_html(self, path: str | Path, *, title: str = "F, I and W") -> Path:
        """Write one offline HTML file that shows the three graphs."""
        from sternway import viewer

        return viewer.write(path, title=title, graph=self.to_record())

    def __str__(self) -> str:
        rows = [f"{'':8}{'operations':>12}{'GFLOPs':>10}"]
        rows += [f"{graph.name:8}{graph.operations:12}{graph.flops / 1e9:10.3f}" for graph in (self.F, self.I, self.W)]
        crossing = {"F to I": self.f_to_i, "F to W": self.f_to_w, "I to W": self.i_to_w}
        rows += [f"{name:8}{count:16,} bytes" for name, count in crossing.items()]
        rows += [f"held after F {self.held_after_f:,} bytes, after I {self.held_after_i:,}"]
        return "\n".join(rows)


def describe(module: GraphModule, name: str) -> CompiledGraph:
    """A graph as a record, which does not keep the graph alive."""
    nodes = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        value = example_value(node)
        whole = isinstance(value, Tensor)
        nodes.append(
            CompiledNode(
                name=node.name,
                op="input" if node.op in ("placeholder", "get_attr") else _op(node.target),
                inputs=tuple(source.name for source in node.all_input_nodes),
                shape=tuple(size_hint(size) for size in value.shape) if whole else None,
                dtype=str(value.dtype).removeprefix("torch.") if whole else "",
                device=str(value.device) if whole else "",
                nbytes=nbytes(value),
                flops=flops(node),
                costly=is_costly(node),
            )
        )
    return CompiledGraph(name, tuple(nodes), module.print_readable(print_output=False).strip())


def _op(target: Any) -> str:
    return str(target).removesuffix(".default") if isinstance(target, OpOverload) else target.__name__
