"""The sections on training: modules, what is called with which settings, and what was measured."""

from __future__ import annotations

import json

from sternway.atlas._about import About
from sternway.atlas._blocks import At, Block, Code, Items, Section, To, Words, cut, joined, section, sentence, table

_MEASURED = ("class", "as", "parameters", "bytes kept", "backward nodes", "F, ms", "I, ms", "W, ms", "defined at")
_MOST = 40  # entries of one list; what is left out is counted
_KINDS = (
    "optimizer",
    "scheduler",
    "loss",
    "backward",
    "gradient clipping",
    "mixed precision",
    "compile",
    "data parallel",
    "process group",
    "pipeline",
    "checkpoint save",
    "checkpoint load",
    "seed",
    "data loader",
)


class Training(About):
    """Training and measured facts."""

    def training(self) -> Section | None:
        blocks: list[Block | None] = []
        for module in self.facts.modules:
            if module.name in self.context.modules:
                blocks.append(self._module(module.name))
        plain = {module.name for module in self.facts.modules}
        rest = [name for name in self.context.modules if name not in plain]
        if rest:
            lines = {item.name: item.line for item in self.facts.definitions if item.kind == "class"}
            blocks.append(
                sentence(
                    "Also nn.Module subclasses, with neither a forward nor submodules of their own: ",
                    *joined((Code(name), " (", self.at(lines[name]), ")") for name in rest),
                    ".",
                )
            )
        groups = self._groups("training")
        ordered = {kind: groups[kind] for kind in _KINDS if kind in groups}
        blocks.append(table(("kind", "call", "more", "where"), self._rows(ordered)))
        return section("Training", *blocks)

    def _module(self, name: str) -> Block:
        module = next(item for item in self.facts.modules if item.name == name)
        words: list[Words] = [
            (Code(name), " is an nn.Module (bases ", Code(module.base), ", ", self.at(module.line), ")")
        ]
        if module.forward:
            words.append(("forward", Code(module.forward), " at ", self.at(module.forward_line)))
        if module.parts:
            parts = [(Code(part), " = ", Code(made), " (", self.at(line), ")") for part, made, line in module.parts]
            words.append(("submodules and other objects made in __init__: ", *cut(parts, _MOST)))
        return Items((joined(words, "; "),))

    def measured(self) -> Section | None:
        if not self.context.modules:
            return None
        if not self.context.measured:
            return section("Measured", sentence("Not measured. ", "Run with --measure path.py:function to measure."))
        record = json.loads(self.context.measured)
        rows = [
            (
                (Code(row["module"]),),
                (Code(row["name"]),),
                (f"{row['parameters']:,}",),
                (f"{row['saved_bytes']:,}",),
                (f"{row['nodes']:,}",),
                *((value,) if value else () for value in row["times"]),
                (At(self.path, row["line"], f"line {row['line']}"),),
            )
            for row in record["rows"]
        ]
        return section(
            "Measured",
            table(_MEASURED, rows),
            sentence("The whole of ", Code(record["target"]), ": ", record["whole"], "."),
            sentence(To("_site/backward", "", "The backward graph, drawn"), "."),
            sentence("By ", Code(record["command"]), " on ", record["date"], ", ", record["machine"], "."),
        )
