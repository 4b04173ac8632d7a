"""C, C++, CUDA, JavaScript and TypeScript by tree-sitter: definitions, doc comments, calls, includes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sternway import atlas
from sternway.atlas._records import Definition, Facts
from sternway.atlas.read._facts import read_facts
from sternway.atlas.read._languages import language_of

CUDA = """\
// A file about adding.
#include "add.h"
#include <vector>

namespace math {
/// Adds one to each.
template <typename T>
__global__ void add(T* x, const int n) { x[0] = scale(n); }

class Adder : public Base {
 public:
  int run(int a) const;
  void twice() { run(1); this->run(2); add<<<1, 2>>>(x, 3); }
  int total;
};

int Adder::run(int a) const { return a; }
enum class Mode { Fast, Slow };
#define LIMIT 3
}  // namespace math
"""
SCRIPT = """\
/** Starts it. */
export async function start(a, b = 1) { helper(a); other.run(b); return later(); }
import { helper as h, later } from "./lib.js";
import * as other from "./lib.js";
class Page extends Base {
  // Draws.
  draw(x) { this.clear(); h(x); }
  clear() {}
}
const twice = (q) => q * 2;
"""
LIBRARY = "export function helper(x) { return x }\nexport function later() {}\nexport function run() {}\n"
TYPES = """\
interface Shape { area: number; grow(by: number): void }
type Maybe = Shape | null;
enum Colour { Red, Green }
export class Square<T> implements Shape {
  constructor(private side: number) {}
  async grow(by: number): Promise<void> { save<T>(by) }
}
"""


def _facts(text: str, path: str) -> Facts:
    return read_facts(text, language_of(path), "", "", None)[0]


def _named(facts: Facts) -> dict[str, Definition]:
    return {item.name: item for item in facts.definitions}


def test_cuda_definitions_calls_and_includes() -> None:
    facts = _facts(CUDA, "a.cu")
    named = _named(facts)
    kinds = {name: item.kind for name, item in named.items()}
    assert kinds == {
        "math": "namespace",
        "math::add": "function",
        "math::Adder": "class",
        "math::Adder::run": "method",
        "math::Adder::twice": "method",
        "math::Adder::total": "variable",
        "math::Mode": "enum",
        "math::Mode::Fast": "variable",
        "math::Mode::Slow": "variable",
        "math::LIMIT": "macro",
    }
    assert named["math::add"].doc == "Adds one to each."
    assert named["math::add"].signature == "__global__ void add(T* x, const int n)"
    assert facts.doc == "A file about adding."
    assert [(item.module, item.line) for item in facts.imports] == [("add.h", 2), ("vector", 3)]
    assert [(call.name, call.line, call.scope) for call in facts.calls] == [
        ("scale", 8, "math::add"),
        ("run", 13, "math::Adder::twice"),
        ("this.run", 13, "math::Adder::twice"),
        ("add", 13, "math::Adder::twice"),
    ]
    assert [(base.owner, base.name) for base in facts.bases] == [("math::Adder", "Base")]


def test_scripts() -> None:
    facts = _facts(SCRIPT, "a.js")
    kinds = {name: item.kind for name, item in _named(facts).items()}
    assert kinds == {
        "start": "function",
        "Page": "class",
        "Page.draw": "method",
        "Page.clear": "method",
        "twice": "function",
    }
    assert _named(facts)["start"].doc == "Starts it."
    assert _named(facts)["Page.draw"].doc == "Draws."
    types = {name: item.kind for name, item in _named(_facts(TYPES, "a.ts")).items()}
    assert types == {
        "Shape": "interface",
        "Shape.area": "variable",
        "Shape.grow": "method",
        "Maybe": "type",
        "Colour": "enum",
        "Square": "class",
        "Square.constructor": "method",
        "Square.grow": "method",
    }


def test_calls_lead_to_definitions_across_files(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.cu").write_text(CUDA)
    (source / "add.h").write_text(
        "#pragma once\n// Scales.\ninline int scale(int n) { return n; }\nstruct Base { int left; };\n"
    )
    (source / "a.js").write_text(SCRIPT)
    (source / "lib.js").write_text(LIBRARY)
    report = atlas.build(source, tmp_path / "out")
    assert report.ok
    assert report.problems == ()
    header = (tmp_path / "out/add.h_docs.md").read_text()
    assert "| `scale` | [a.cu:8](../src/a.cu#L8) |" in header
    assert "| `Base` | `math::Adder` [a.cu:10](../src/a.cu#L10) |" in header
    library = (tmp_path / "out/lib.js_docs.md").read_text()
    assert "| `helper` | [a.js:7](../src/a.js#L7) |" in library  # by the name it was imported as
    assert "| `later` | [a.js:2](../src/a.js#L2) |" in library
    assert "| `run` | [a.js:2](../src/a.js#L2) |" in library
    script = (tmp_path / "out/a.js_docs.md").read_text()
    assert "| `Page.clear` | [line 7](../src/a.js#L7) |" in script
    assert "tree-sitter" in script


@pytest.mark.parametrize("path", ["a.c", "a.cpp", "a.cu", "a.js", "a.ts"])
@pytest.mark.parametrize("text", ["", "}}}} ((((", "int f( {", "\x00\x01", "/* never ends", "class", "(" * 3000])
def test_broken_files_are_read_all_the_same(path: str, text: str) -> None:
    assert _facts(text, path).parser == "tree-sitter"
