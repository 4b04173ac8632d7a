"""The page on the backward pass of a whole tree: modules and their graphs, backward calls, hooks, what is saved."""

from __future__ import annotations

import json
from typing import Any

from sternway.atlas._paths import shown
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Fold,
    Page,
    Ref,
    Section,
    To,
    Words,
    folded,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas.pages._folder_page import TreeFacts

_MOST = 200  # rows of one table; the rest is counted
_SHOWN = 40  # rows before a table is folded
_KINDS = {
    "backward": "Backward calls",
    "hook": "Hooks",
    "saved tensors": "Saved tensors",
    "activation checkpoint": "Activation checkpoints",
    "optimizer": "Optimizers and their settings",
    "gradient clipping": "Gradient clipping",
    "mixed precision": "Mixed precision",
}


def backward_page(known: TreeFacts, measured: str) -> Page:
    """One page for the tree. ``measured``: the record of ``--measure``, empty if there is none."""
    record: dict[str, Any] = json.loads(measured) if measured else {}
    graphs = {(row["path"], row["module"]): row for row in record.get("rows", ()) if row.get("graph")}
    found = [
        section("Modules", *_modules(known, graphs)),
        section("Autograd functions", _functions(known)),
        *(_facts(known, kind, title) for kind, title in _KINDS.items()),
    ]
    if record:
        whole = sentence("The whole of ", Code(record["target"]), ": ", record["whole"], ".")
        found.insert(
            0, section("Measured", whole, sentence(To("_site/backward", "", "Its backward graph, drawn"), "."))
        )
    kept = sections(*found)
    if not kept:
        kept = sections(section("", sentence("No file of this tree defines an nn.Module or calls a backward.")))
    return Page("backward", "", f"The backward pass in {known.tree}", kept)


def _modules(known: TreeFacts, graphs: dict[tuple[str, str], dict[str, Any]]) -> list[Block | None]:
    rows: list[tuple[Words, ...]] = []
    for path, context in sorted(known.whole.contexts.items()):
        facts = {item.name: item for item in known.facts[path].modules}
        lines = {item.name: item.line for item in known.facts[path].definitions if item.kind == "class"}
        for name in context.modules:
            item, row = facts.get(name), graphs.get((path, name))
            forward: Words = (Code(item.forward),) if item and item.forward else ()
            drawn: Words = (To(row["graph"], "", "graph"),) if row else ()
            times: Words = (", ".join(filter(None, row["times"])),) if row and any(row["times"]) else ()
            saved: Words = (f"{row['saved_bytes']:,}",) if row else ()
            where = (To("docs", path, shown(path)),)
            rows.append(((Ref(name, path, name, lines[name]),), where, forward, times, saved, drawn))
    rows.sort(key=lambda row: not row[-1])  # those with a graph first
    head = ("module", "file", "forward", "F, I, W in ms", "bytes kept", "backward")
    made = folded(f"{len(rows):,} modules", table(head, rows[:_MOST]), len(rows), _SHOWN)
    return [made, sentence(f"{_MOST} of {len(rows):,}.") if len(rows) > _MOST else None]


def _functions(known: TreeFacts) -> Block | None:
    rows = [
        ((Code(fact.text),), (At(path, fact.line),))
        for path, facts in sorted(known.facts.items())
        for fact in facts.facts
        if fact.section == "patterns" and fact.kind == "autograd function"
    ]
    return folded(f"{len(rows):,} functions", table(("function", "where"), rows[:_MOST]), len(rows), _SHOWN)


def _facts(known: TreeFacts, kind: str, title: str) -> Section | None:
    rows: list[tuple[Words, ...]] = []
    for path, facts in sorted(known.facts.items()):
        for fact in facts.facts:
            if fact.section == "training" and fact.kind == kind:
                rows.append(((Code(fact.text),), (fact.note,) if fact.note else (), (At(path, fact.line),)))
    made = table(("call", "more", "where"), rows[:_MOST])
    if made is None:
        return None
    more = sentence(f"{_MOST} of {len(rows):,}.") if len(rows) > _MOST else None
    return section(title, Fold(f"{len(rows):,} places", (made,)) if len(rows) > _SHOWN else made, more)
