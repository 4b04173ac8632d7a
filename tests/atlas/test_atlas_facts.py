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


def test_structure_has_signatures_decorators_and_lines(out: Path) -> None:
    structure = _section(out / "pkg/model.py_docs.md", "Structure")
    assert "| `Block` | class | [lines 13–21](model.py_docs.html#L13) | `(nn.Module)` |" in structure
    assert "`(self, x, *, gain: float=1.0)`" in structure
    assert "One block; see `scale`." in structure
    util = _section(out / "pkg/util.py_docs.md", "Structure")
    assert "| `wait` | async function | [lines 17–18](util.py_docs.html#L17) | `()` | `@lru_cache` |" in util
    assert "Documents raising `ValueError`" in util


def test_imports_resolve_to_files_or_are_called_unresolved(out: Path) -> None:
    model = _section(out / "pkg/model.py_docs.md", "Dependencies")
    assert "| `torch.nn` |  | `nn` | outside the tree |" in model
    assert "| `.util` | `scale` |  | [pkg/util.py](util.py_docs.md) |" in model
    main = _section(out / "main.py_docs.md", "Dependencies")
    assert re.search(r"\| `argparse` .* standard library \|", main)
    assert re.search(r"\| `nowhere` .* outside the tree \|", main)
    assert "Imported by [main.py:5](../main.py_docs.html#L5), [pkg/model.py:8](model.py_docs.html#L8)" in _section(
        out / "pkg/util.py_docs.md", "Cross-references"
    )


def test_callers_and_subclasses_are_found_across_files(out: Path) -> None:
    util = _section(out / "pkg/util.py_docs.md", "Cross-references")
    assert "| `scale` | [main.py:14](../main.py_docs.html#L14), [pkg/model.py:21](model.py_docs.html#L21) |" in util
    model = _section(out / "pkg/model.py_docs.md", "Cross-references")
    assert "| `Block` | `Deep` [pkg/model.py:24](model.py_docs.html#L24) |" in model


def test_security_is_real_calls_only(out: Path) -> None:
    security = _section(out / "pkg/util.py_docs.md", "Security")
    assert re.findall(r"^\| (\S+) \|.*#L(\d+)\) \|$", security, re.MULTILINE) == [
        ("eval", "18"),
        ("pickle.loads", "29"),
        ("subprocess.run", "28"),
    ]
    assert "shell=True" in security
    assert _section(out / "pkg/__init__.py_docs.md", "Security") == ""


def test_training_facts(out: Path) -> None:
    training = _section(out / "pkg/model.py_docs.md", "Training")
    assert "`Block` is an nn.Module (bases `nn.Module`, [line 13](model.py_docs.html#L13))" in training
    assert "forward`(self, x, *, gain: float=1.0)`" in training
    assert "`up` = `torch.nn.Linear`" in training
    assert "nn.Module subclasses, with neither a forward nor submodules of their own: `Deep`" in training
    assert "literal settings: lr=0.0003, betas=(0.9, 0.95)" in training
    assert "keys: 'model', 'step'" in training
    assert "weights\\_only: True; keys read: 'model'" in training
    kinds = re.findall(r"^\| ([a-z ]+) \| `", training, re.MULTILINE)
    assert kinds == ["optimizer", "loss", "backward", "checkpoint save", "checkpoint load", "seed"]
    assert "Not measured." in _section(out / "pkg/model.py_docs.md", "Measured")
    assert _section(out / "pkg/util.py_docs.md", "Measured") == ""


def test_options_say_where_they_are_read(out: Path) -> None:
    settings = _section(out / "main.py_docs.md", "Settings")
    assert (
        "| `--lr` | option | `0.1` | [line 13](main.py_docs.html#L13) | [line 11](main.py_docs.html#L11) |" in settings
    )
    assert "`HOME` | environment" in settings
    keys = _section(out / "config.yaml_docs.md", "Settings")
    assert "| `train.model` | key | `small` | [pkg/model.py:36](pkg/model.py_docs.html#L36) |" in keys


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
def test_other_languages_by_ctags_and_labelled(out: Path) -> None:
    page = (out / "kernel.cu_docs.md").read_text()
    assert "| Read by | universal-ctags" in page
    assert "| `add` | function | " in page
    assert "[add.h](add.h_docs.md)" in _section(out / "kernel.cu_docs.md", "Dependencies")
    assert "Adds two vectors." in _section(out / "kernel.cu_docs.md", "Purpose")
    assert "[kernel.cu:2](kernel.cu_docs.html#L2)" in _section(out / "add.h_docs.md", "Cross-references")


def test_without_ctags_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ctags, "version", lambda: "")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.c").write_text("int f(void) { return 1; }\n")
    report = atlas.build(tmp_path / "src", tmp_path / "out", jobs=1)
    assert [(item.kind, item.text) for item in report.problems] == [("no parser", _ctags.MISSING)]
    assert "universal-ctags is not installed" in (tmp_path / "out/a.c_docs.md").read_text()


def test_keys_of_configuration_files(out: Path) -> None:
    names = re.findall(r"^\| `([^`]+)` \| key", _section(out / "data.json_docs.md", "Settings"), re.MULTILINE)
    assert names == ["a", "a.b", "a.b.c", "d"]
    assert "`project.scripts.go`" in _section(out / "pyproject.toml_docs.md", "Settings")
    assert "cannot be parsed" in (out / "broken.json_docs.md").read_text()


def test_keywords_are_complete_and_lead_to_lines(out: Path) -> None:
    """Every identifier of the tree is there with exactly its lines."""
    page = (out / "pkg/model.py_kw.md").read_text()
    listed: dict[str, set[int]] = {}
    for name, kind, rest in re.findall(r"^- `([^`]+)` (\w+)(.*)$", page, re.MULTILINE):
        if kind != "word":
            listed[name] = {int(line) for line in re.findall(r"#L(\d+)\)", rest)}
    wanted: dict[str, set[int]] = {}
    for node in ast.walk(ast.parse(odd_tree.MODEL)):
        if isinstance(node, ast.Name):
            wanted.setdefault(node.id, set()).add(node.lineno)
        elif isinstance(node, ast.Attribute):
            wanted.setdefault(node.attr, set()).add(node.end_lineno or 0)
    for name, lines in wanted.items():
        assert lines <= listed[name], name
    assert "- `Block` class defined at [13](model.py_docs.html#L13) used at" in page
    assert re.search(r"- `paragraph` word used at \[3\]", page)
    assert "`the` word" not in page.lower()
    assert "- `Block` class defined at [pkg/model.py:13](pkg/model.py_docs.html#L13)" in (out / "sub.md").read_text()


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
