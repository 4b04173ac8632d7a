"""Unchanged trees write nothing, changed files only what depends on them, and the same source gives the same bytes."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import zlib
from pathlib import Path

import odd_tree
import pytest

from sternway import atlas
from sternway.atlas.run import _store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return odd_tree.build(tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _written(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name, data in after.items() if before.get(name) != data and not name.startswith(".atlas")}


def test_unchanged_writes_nothing(source: Path, out: Path) -> None:
    first = atlas.build(source, out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    second = atlas.build(source, out)
    assert (second.written, second.removed, second.kept) == (0, 0, first.written)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    assert (second.problems, second.languages, second.lines) == (first.problems, first.languages, first.lines)


def test_two_builds_are_identical_bytes(source: Path, out: Path, tmp_path: Path) -> None:
    atlas.build(source, out)
    atlas.build(source, tmp_path / "other", jobs=2)
    assert _bytes(out) == _bytes(tmp_path / "other")


def test_processes_and_one_process_write_the_same(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sternway.atlas.run import _run

    atlas.build(source, out, jobs=1)
    monkeypatch.setattr(_run, "_SMALL", 0)
    monkeypatch.setattr(_run, "_CHUNK", 500)
    atlas.build(source, tmp_path / "other", jobs=2)
    assert _bytes(out) == _bytes(tmp_path / "other")


def test_a_change_rewrites_what_depends_on_it(source: Path, out: Path, tmp_path: Path) -> None:
    atlas.build(source, out)
    before = _bytes(out)
    util = source / "pkg" / "util.py"
    util.write_text(util.read_text().replace("def scale", "\ndef scale"))  # its lines move
    report = atlas.build(source, out)
    written = _written(before, _bytes(out))
    assert report.written < report.kept
    assert {"pkg/util.py_docs.md", "pkg/util.py_kw.html", "pkg/model.py_docs.md", "pkg/sub.md", "sub.md"} <= written
    assert not {"README.md_docs.md", "add.h_docs.html", "latin.py_kw.md"} & written
    atlas.build(source, tmp_path / "fresh")
    assert _bytes(out) == _bytes(tmp_path / "fresh")


def test_a_deleted_file_takes_its_pages_with_it(source: Path, out: Path, tmp_path: Path) -> None:
    atlas.build(source, out)
    shutil.rmtree(source / "sub ~ folder")
    (source / "pkg" / "model.py").unlink()
    report = atlas.build(source, out)
    assert report.removed > 0
    assert report.broken == ()
    assert not list(out.glob("sub~20*"))
    atlas.build(source, tmp_path / "fresh")
    assert _bytes(out) == _bytes(tmp_path / "fresh")


def test_a_damaged_page_is_made_again(source: Path, out: Path) -> None:
    atlas.build(source, out)
    before = _bytes(out)
    (out / "main.py_docs.md").write_text("damaged")
    (out / "pkg" / "index.html").unlink()
    report = atlas.build(source, out)
    assert 0 < report.written <= 4
    assert _bytes(out) == before


def test_another_generator_makes_every_page_again(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = atlas.build(source, out)
    monkeypatch.setattr("sternway.atlas.run._run.generator", lambda: "another")
    second = atlas.build(source, out)
    assert (second.written, second.kept) == (0, first.written)  # made again, the same
    assert json.loads(zlib.decompress((out / ".atlas" / "manifest.json.z").read_bytes()))["generator"] == "another"


@pytest.mark.parametrize("installed", [{"griffelib": "2.1"}, {"griffe": "1.5"}, {"griffe": "2.1", "griffelib": "2.1"}])
def test_any_allowed_griffe_is_known_to_the_generator(installed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before version 2 there is no distribution griffelib; and another version makes pages anew."""
    others = dict.fromkeys(_store._USED, "3")

    def version(name: str) -> str:
        try:
            return {**others, **installed}[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = _store.generator.__wrapped__()
    installed.update(dict.fromkeys(installed, "9.9"))
    assert _store.generator.__wrapped__() != found


def test_check_says_what_is_stale(source: Path, out: Path) -> None:
    assert atlas.check(source, out).stale == ("there are no pages yet",)
    atlas.build(source, out)
    assert atlas.check(source, out).ok
    (source / "main.py").write_text("x = 1\n")
    (source / "new.py").write_text("x = 1\n")
    (source / "empty.py").unlink()
    (out / "reading.md").write_text("by hand")
    (out / "_site" / "atlas.css").unlink()
    report = atlas.check(source, out)
    assert not report.ok
    assert report.stale == (
        "empty.py is gone",
        "main.py has changed",
        "new.py is new",
        "the page _site/atlas.css is missing",
        "the page reading.md was changed by hand",
    )


def test_check_follows_links_on_disk(source: Path, out: Path) -> None:
    atlas.build(source, out)
    page = out / "index.md"
    page.write_text(page.read_text() + "[gone](nowhere.md) [far](main.py_docs.html#L9999) `[no](code.md)`\n")
    broken = atlas.check(source, out).broken
    assert [item.target for item in broken] == ["main.py_docs.html#L9999", "nowhere.md"]


def test_a_strangers_manifest_is_not_obeyed(source: Path, out: Path, tmp_path: Path) -> None:
    """A page outside the output, named in a manifest, must not be removed."""
    atlas.build(source, out)
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    manifest = out / ".atlas" / "manifest.json.z"
    raw = json.loads(zlib.decompress(manifest.read_bytes()))
    raw["pages"]["../precious.txt"] = ["", "", 4]
    raw["pages"][str(precious)] = ["", "", 4]
    manifest.write_bytes(zlib.compress(json.dumps(raw).encode()))
    (source / "new.py").write_text("x = 1\n")
    atlas.build(source, out)
    assert precious.read_text() == "mine"
    manifest.write_text("not json")
    assert _store.load(out) is None
    assert atlas.build(source, out).ok
