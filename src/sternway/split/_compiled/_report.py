"""What the compiler made of a module: three graphs, what crosses between them, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sternway.split._compiled._ops import flops, hint, is_costly, nbytes


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a compiled graph, in the order in which it runs."""

    name: str
    op: str  # "aten.mm"; "input" for what comes from outside
    inputs: tuple[str, ...]  # by name
    shape: tuple[int, ...] | None  # None for several tensors, or none
    dtype: str
    device: str
    nbytes: int
    flops: int
    costly: bool  # a product, a convolution, a table: what is worth waiting for


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """F, I or W."""

    name: str
    steps: tuple[Step, ...]
    code: str  # as readable Python, with shapes

    @property
    def nodes(self) -> int:
        """How many operations it has."""
        return sum(step.op != "input" for step in self.steps)

    @property
    def flops(self) -> int:
        """Floating-point operations, by torch's formulas for products, convolutions and attention."""
        return sum(step.flops for step in self.steps)


@dataclass(frozen=True, slots=True)
class CompiledGraphs:
    """The three graphs of one compiled region. Sizes that vary are counted as they were when it was compiled.

    A value that both I and W need of F counts in ``f_to_i`` and in ``f_to_w``. Parameters count nowhere.
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
        """Bytes that wait for W."""
        return self.f_to_w + self.i_to_w

    def to_record(self) -> dict[str, Any]:
        """The three as one graph, in the form that the viewer draws (docs/graph_json.md)."""
        tensors: dict[tuple[Any, str, str], int] = {}
        numbers: dict[str, int] = {}
        nodes: list[dict[str, Any]] = []
        for graph in (self.F, self.I, self.W):
            for step in graph.steps:
                if step.op == "input" and step.name in numbers:
                    continue  # what an earlier graph made
                inputs = [numbers[name] for name in step.inputs]
                kind = tensors.setdefault((step.shape, step.dtype, step.device), len(tensors))
                numbers[step.name] = len(nodes)
                node = {"kind": step.op, "sequence": len(nodes), "outputs": [kind], "module": graph.name}
                node["inputs"] = [nodes[number]["outputs"][0] for number in inputs]
                node["next"] = [[number, 0] for number in inputs]
                nodes.append(node)
        waits = [
            {"node": numbers[step.name], "kind": step.op, "module": "W", "parameters": []}
            for step in self.W.steps
            if step.costly
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
        rows = [f"{'':8}{'nodes':>8}{'GFLOPs':>10}"]
        rows += [f"{graph.name:8}{graph.nodes:8}{graph.flops / 1e9:10.3f}" for graph in (self.F, self.I, self.W)]
        crossing = {"F to I": self.f_to_i, "F to W": self.f_to_w, "I to W": self.i_to_w}
        rows += [f"{name:8}{count:14,} bytes" for name, count in crossing.items()]
        rows += [f"held after F {self.held_after_f:,} bytes, after I {self.held_after_i:,}"]
        return "\n".join(rows)


def describe(module: GraphModule, name: str) -> CompiledGraph:
    """A graph as a record; nothing of it is kept."""
    steps = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        whole = isinstance(value, Tensor)
        steps.append(
            Step(
                name=node.name,
                op="input" if node.op in ("placeholder", "get_attr") else _op(node.target),
                inputs=tuple(source.name for source in node.all_input_nodes),
                shape=tuple(hint(size) for size in value.shape) if whole else None,
                dtype=str(value.dtype).removeprefix("torch.") if whole else "",
                device=str(value.device) if whole else "",
                nbytes=nbytes(value),
                flops=flops(node),
                costly=is_costly(node),
            )
        )
    return CompiledGraph(name, tuple(steps), module.print_readable(print_output=False).strip())


def _op(target: Any) -> str:
    return str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else target.__name__
