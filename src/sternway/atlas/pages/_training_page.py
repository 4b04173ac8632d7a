"""The sections on training: modules, training calls with their arguments, and measurements."""

from __future__ import annotations

import json

from sternway.atlas._records import ModuleFacts
from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Items,
    Section,
    To,
    Words,
    cut,
    joined,
    section,
    sentence,
    table,
)

_MEASURED = (
    "class",
    "as",
    "parameters",
    "bytes kept",
    "backward nodes",
    "F, ms",
    "I, ms",
    "W, ms",
    "defined at",
    "backward graph",
)
_MOST = 40  # entries of one list; what is left out is counted
_KINDS = (
    "optimizer",
    "scheduler",
    "loss",
    "backward",
    "hook",
    "saved tensors",
    "activation checkpoint",
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


def training(about: About) -> Section | None:
    blocks: list[Block | None] = []
    for module in about.facts.modules:
        if module.name in about.context.modules:
            blocks.append(_module(about, module))
    plain = {module.name for module in about.facts.modules}
    rest = [name for name in about.context.modules if name not in plain]
    if rest:
        lines = {item.name: item.line for item in about.facts.definitions if item.kind == "class"}
        blocks.append(
            sentence(
                "Also nn.Module subclasses, with neither a forward nor submodules of their own: ",
                *joined((Code(name), " (", about.at(lines[name]), ")") for name in rest),
                ".",
            )
        )
    groups = about.groups("training")
    ordered = {kind: groups[kind] for kind in _KINDS if kind in groups}
    blocks.append(table(("kind", "call", "more", "where"), about.rows(ordered)))
    return section("Training and backward", *blocks)


def _module(about: About, module: ModuleFacts) -> Block:
    words: list[Words] = [
        (Code(module.name), " is an nn.Module (bases ", Code(module.base), ", ", about.at(module.line), ")")
    ]
    if module.forward:
        words.append(("forward", Code(module.forward), " at ", about.at(module.forward_line)))
    if module.parts:
        parts = [(Code(part), " = ", Code(made), " (", about.at(line), ")") for part, made, line in module.parts]
        words.append(("submodules and other objects made in __init__: ", *cut(parts, _MOST)))
    return Items((joined(words, "; "),))


def measured(about: About) -> Section | None:
    if not about.context.measured:
        return None
    record = json.loads(about.context.measured)
    rows = [
        (
            (Code(row["module"]),),
            (Code(row["name"]),),
            (f"{row['parameters']:,}",),
            (f"{row['saved_bytes']:,}",),
            (f"{row['nodes']:,}",),
            *((value,) if value else () for value in row["times"]),
            (At(about.path, row["line"], f"line {row['line']}"),),
            (To(row["graph"], "", "drawn"),) if row.get("graph") else (),
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
