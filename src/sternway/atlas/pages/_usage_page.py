"""The sections on how a file is used and tested: excerpts of real calls, and the tests that reach its definitions."""

from __future__ import annotations

from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Fence,
    Fold,
    Paragraph,
    Section,
    Words,
    cut,
    folded,
    joined,
    section,
    sentence,
    table,
)
from sternway.atlas.relate._usage import ReachingTest

_SHOWN = 6  # definitions with excerpts before the rest is folded
_MOST = 24  # definitions with excerpts
_ROWS = 12  # rows of a list before it is folded


def usage(about: About) -> Section | None:
    """Calls from other files, as they stand there."""
    parts: list[list[Block]] = []
    for name, sites in about.context.examples[:_MOST]:
        blocks: list[Block] = []
        for site in sites:
            if text := about.excerpts.get(site, ""):
                blocks += [Paragraph((about.ref(name), " at ", At(site.path, site.first))), Fence(text, "python")]
        if blocks:
            parts.append(blocks)
    shown = [block for blocks in parts[:_SHOWN] for block in blocks]
    rest = tuple(block for blocks in parts[_SHOWN:] for block in blocks)
    more = Fold(f"Examples of {len(parts) - _SHOWN} more definitions", rest) if rest else None
    return section("Usage examples", *shown, more)


def testing(about: About) -> Section | None:
    """The file's own tests, and tests elsewhere that reach its definitions through calls."""
    own = list(about.rows(about.groups("testing")))
    listed = folded(f"{len(own)} facts", table(("kind", "what", "more", "where"), own), len(own), _ROWS)
    reached_names = {name for name, _ in about.context.tests}
    rows = [
        ((about.ref(name),), joined(map(_test, tests)))
        for name, tests in about.context.tests
        if not (name.endswith(".__init__") and name.removesuffix(".__init__") in reached_names)  # as the class is
    ]
    reached = folded(f"{len(rows)} definitions", table(("definition", "reached by"), rows), len(rows), _ROWS)
    by = about.context.importing_tests
    imported = sentence("Test files that import it: ", *cut([(At(*test),) for test in by], 20), ".") if by else None
    return section("Testing", listed, reached, imported)


def _test(test: ReachingTest) -> Words:
    link = At(test.path, test.line, test.name)
    return (link,) if test.calls == 1 else (link, f" ({test.calls} calls deep, through {test.through})")


def hot_loops(about: About) -> list[tuple[Words, ...]]:
    """Functions with a loop that calls something, and that a loop elsewhere calls: rows of the findings' table."""
    inner: dict[str, tuple[int, str, int]] = {}
    for call in about.facts.calls:
        if call.loop and call.loop != call.line and call.scope not in inner:
            inner[call.scope] = (call.loop, call.name, call.line)
    rows: list[tuple[Words, ...]] = []
    for name, path, line in about.context.hot:
        if name in inner:
            loop, callee, at = inner[name]
            note: Words = (
                f"line {at} calls {callee} in the loop at line {loop}; a loop calls {name} at ",
                At(path, line),
            )
            rows.append((("low",), ("loop in a hot path",), (about.ref(name),), note, (about.at(loop),)))
    return rows
