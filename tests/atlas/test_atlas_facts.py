"""What the pages say is what the source has, each with its line; what it has not is not said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import odd_tree
import pytest

from sternway import atlas
from sternway.atlas._records import Facts, pack, unpack
from sternway.atlas.read import _ctags
from sternway.atlas.read._facts import read_facts
from sternway.atlas.read._languages import language_of

has_ctags = pytest.mark.skipif(
    not _ctags.version(), reason="universal-ctags is not installed: apt install universal-ctags"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    report = atlas.build(odd_tree.build(folder / "source"), folder / "out")
    assert report.broken == ()
    return folder / "out"


def _section(page: Path, title: str) -> str:
    match = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    return match[1] if match else ""


def _facts(text: str, path: str = "m.py", module: str = "m", package: str = "") -> Facts:
    return read_facts(text, language_of(path), module, package, None)[0]


def _found(text: str, section: str) -> list[tuple[str, int]]:
    return [(fact.kind, fact.line) for fact in _facts(text).facts if fact.section == section]


def test_the_breakdown_has_signatures_decorators_and_lines(out: Path) -> None:
    model = _section(out / "pkg/model.py_docs.md", "Detailed breakdown")
    assert (
        "### class `Block`\n\n```python\nclass Block(nn.Module)\n```\n\n[lines 13–21](../../source/pkg/model.py#L13)"
        in model
    )
    assert (
        "| `Block.forward` | method | [lines 20–21](../../source/pkg/model.py#L20) | `(self, x, *, gain: float=1.0)`"
        in model
    )
    assert "One block; see [`scale`](../../source/pkg/util.py#L7)." in model
    util = _section(out / "pkg/util.py_docs.md", "Detailed breakdown")
    assert "| `wait` | async function | [lines 17–18](../../source/pkg/util.py#L17) | `()` | `@lru_cache` |" in util
    assert "**Raises**\n\n- `ValueError`: if it is wrong." in util


def test_imports_resolve_to_files_or_are_called_unresolved(out: Path) -> None:
    model = _section(out / "pkg/model.py_docs.md", "Dependencies")
    assert "| `torch.nn` | as `nn` | outside the tree |" in model
    assert "| `.util` | `scale`, `missing` | [pkg/util.py](util.py_docs.md) |" in model
    main = _section(out / "main.py_docs.md", "Dependencies")
    assert re.search(r"\| `argparse` .* standard library \|", main)
    assert re.search(r"\| `nowhere` .* outside the tree \|", main)
    assert (
        "Imported by [main.py:5](../../source/main.py#L5), [pkg/model.py:8](../../source/pkg/model.py#L8)"
        in _section(out / "pkg/util.py_docs.md", "Cross-references")
    )


def test_callers_and_subclasses_are_found_across_files(out: Path) -> None:
    util = _section(out / "pkg/util.py_docs.md", "Cross-references")
    assert (
        "| `scale` | [main.py:14](../../source/main.py#L14), [pkg/model.py:21](../../source/pkg/model.py#L21) |" in util
    )
    model = _section(out / "pkg/model.py_docs.md", "Cross-references")
    assert "| `Block` | `Deep` [pkg/model.py:24](../../source/pkg/model.py#L24) |" in model


def test_security_is_real_calls_only(out: Path) -> None:
    security = _section(out / "pkg/util.py_docs.md", "Security and safety")
    assert re.findall(r"^\| (\S+) \| (\S+) \|.*#L(\d+)\) \|$", security, re.MULTILINE) == [
        ("high", "eval", "18"),
        ("high", "pickle.loads", "29"),
        ("high", "subprocess.run", "28"),
    ]
    assert "shell=True" in security
    assert _section(out / "pkg/__init__.py_docs.md", "Security and safety") == ""


def test_training_facts(out: Path) -> None:
    training = _section(out / "pkg/model.py_docs.md", "Training and backward")
    assert "`Block` is an nn.Module (bases `nn.Module`, [line 13](../../source/pkg/model.py#L13))" in training
    assert "forward`(self, x, *, gain: float=1.0)`" in training
    assert "`up` = `torch.nn.Linear`" in training
    assert "nn.Module subclasses, with neither a forward nor submodules of their own: `Deep`" in training
    assert "literal settings: lr=0.0003, betas=(0.9, 0.95)" in training
    assert "keys: 'model', 'step'" in training
    assert "weights\\_only: True; keys read: 'model'" in training
    kinds = re.findall(r"^\| ([a-z ]+) \| `", training, re.MULTILINE)
    assert kinds == ["optimizer", "loss", "backward", "checkpoint save", "checkpoint load", "seed"]
    assert _section(out / "pkg/model.py_docs.md", "Measured") == ""
    backward = (out / "backward.md").read_text()
    assert "| `loss.backward()` | [pkg/model.py:33](../source/pkg/model.py#L33) |" in backward
    assert "| [`Block`](../source/pkg/model.py#L13) |" in backward


def test_options_say_where_they_are_read(out: Path) -> None:
    settings = _section(out / "main.py_docs.md", "Settings")
    assert (
        "| `--lr` | option | `0.1` | [line 13](../source/main.py#L13) | [line 11](../source/main.py#L11) |" in settings
    )
    assert "`HOME` | environment" in settings
    keys = _section(out / "config.yaml_docs.md", "Settings")
    assert "| `train.model` | key | `small` | [pkg/model.py:36](../source/pkg/model.py#L36) |" in keys


def test_reading_order_starts_at_entry_points(out: Path) -> None:
    order = re.findall(r"^\d+\. \[([^\]]+)\]", (out / "reading.md").read_text(), re.MULTILINE)
    assert set(order[:2]) == {"main.py", "pkg/model.py"}
    text = (out / "reading.md").read_text()
    assert "entry point: runs as a script, by line 18" in text
    assert "entry point: the command go, by pyproject.toml:5" in text


def test_cycles_are_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / "src" / f"{name}.py").write_text(f"import {other}\n")
    (tmp_path / "src" / "d.py").write_text("def f():\n    import d\n")
    atlas.build(tmp_path / "src", tmp_path / "out")
    text = _section(tmp_path / "out" / "reading.md", "Import cycles")
    assert "3 files that reach each other" in text
    assert "[a.py](a.py_docs.md) → [b.py](b.py_docs.md) → [c.py](c.py_docs.md) → [a.py](a.py_docs.md)" in text
    assert "import cycle with [b.py](b.py_docs.md), [c.py](c.py_docs.md)" in (tmp_path / "out/a.py_docs.md").read_text()


@has_ctags
def test_other_languages_by_ctags_and_labelled(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.go").write_text("// Package a adds.\npackage a\nfunc Add(x int) int { return x }\n")
    atlas.build(tmp_path / "src", tmp_path / "out", jobs=1)
    page = (tmp_path / "out/a.go_docs.md").read_text()
    assert "| Read by | universal-ctags" in page
    assert "`a::Add`" in _section(tmp_path / "out/a.go_docs.md", "Detailed breakdown")
    assert "Package a adds." in _section(tmp_path / "out/a.go_docs.md", "Overview")


def test_without_ctags_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ctags, "version", lambda: "")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.go").write_text("package a\n")
    report = atlas.build(tmp_path / "src", tmp_path / "out", jobs=1)
    assert [(item.kind, item.text) for item in report.problems] == [("no parser", _ctags.MISSING)]
    assert "universal-ctags is not installed" in (tmp_path / "out/a.go_docs.md").read_text()


def test_keys_of_configuration_files(out: Path) -> None:
    names = re.findall(r"^\| `([^`]+)` \| key", _section(out / "data.json_docs.md", "Settings"), re.MULTILINE)
    assert names == ["a", "a.b", "a.b.c", "d"]
    assert "`project.scripts.go`" in _section(out / "pyproject.toml_docs.md", "Settings")
    assert "cannot be parsed" in (out / "broken.json_docs.md").read_text()


def test_keywords_are_complete_and_lead_to_lines(out: Path) -> None:
    """Every identifier of the tree is there with exactly its lines."""
    page = (out / "pkg/model.py_kw.md").read_text()
    listed: dict[str, set[int]] = {}
    for name, rest in re.findall(r"^- `([^`]+)`(.*)$", page, re.MULTILINE):
        lines = re.sub(r"\[(\d+)\]\([^)]*\)|§\d+", r"\1", rest)
        listed.setdefault(name, set()).update(map(int, re.findall(r"\d+", lines)))
    wanted: dict[str, set[int]] = {}
    for node in ast.walk(ast.parse(odd_tree.MODEL)):
        if isinstance(node, ast.Name):
            wanted.setdefault(node.id, set()).add(node.lineno)
        elif isinstance(node, ast.Attribute):
            wanted.setdefault(node.attr, set()).add(node.end_lineno or 0)
    for name, lines in wanted.items():
        assert lines <= listed[name], name
    assert "- `Block` class [13](../../source/pkg/model.py#L13) 24 29 40 §1 §2 §3" in page
    assert "- `paragraph` 3\n" in page
    assert "`the`" not in page
    assert "- `Block` class [pkg/model.py:13](../source/pkg/model.py#L13)" in (out / "sub.md").read_text()
    assert "| Original file | [pkg/model.py](../../source/pkg/model.py) |" in page
    assert "| Documentation | [model.py](model.py_docs.md) |" in page
    assert "| Folder | [pkg](index.md) |" in page
    assert "§2 [Detailed breakdown](model.py_docs.md#detailed-breakdown)" in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pickle\npickle.load(f)", [("pickle.load", 2)]),
        ("from pickle import load as l\nl(f)", [("pickle.load", 2)]),
        ("def f(pickle):\n    pickle.load(1)", []),
        ("model.eval()\nre = 1\nre.compile()", []),
        ("def eval(x): ...\neval(1)", []),
        ("from x import *\neval(1)", []),
        ("exec('x')", [("exec", 1)]),
        ("try:\n    import pickle\nexcept ImportError:\n    pickle = None\npickle.loads(b)", [("pickle.loads", 5)]),
        ("import pickle\npickle = other()\npickle.loads(b)", []),
        ("def f():\n    import os\n    os.system('ls')\nos.system('ls')", [("os.system", 3)]),
        ("class A:\n    import os\n    def f(self):\n        os.system('ls')", []),
        ("import os\n[os for os in x if os.system('ls')]", []),
    ],
)
def test_a_name_means_what_scopes_say(text: str, expected: list[tuple[str, int]]) -> None:
    assert _found(text, "security") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n@torch.compile\ndef f(): ...", [("compile", 2)]),
        ("import torch\nwith torch.autocast('cuda'): pass", [("mixed precision", 2)]),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m)", [("data parallel", 2)]),
        ("from torch.distributed import pipelining\npipelining.PipelineStage(m)", [("pipeline", 2)]),
        ("from torch.optim.lr_scheduler import StepLR\nStepLR(o, 3)", [("scheduler", 2)]),
        ("class F:\n    def backward(ctx):\n        return super().backward(ctx)", []),
        ("import torch\ntorch.optim.lr_scheduler\ntorch.nn.CrossEntropyLoss()", [("loss", 3)]),
    ],
)
def test_training_calls(text: str, expected: list[tuple[str, int]]) -> None:
    assert _found(text, "training") == expected


def test_facts_survive_being_stored() -> None:
    for text in (odd_tree.MODEL, odd_tree.UTIL, odd_tree.MAIN):
        facts = _facts(text)
        assert unpack(pack(facts)) == facts
