"""Every odd file is a plain line in the report; none stops the run, none escapes the output folder."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

import odd_tree
import pytest

from sternway import atlas
from sternway.atlas._paths import file_page, folder_of, safe
from sternway.atlas.pages._markdown import fenced
from sternway.atlas.read import _tree
from sternway.errors import AtlasError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_tree.build(tmp_path_factory.mktemp("odd") / "source")


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Path, atlas.BuildReport]:
    out = source / "docs" / "atlas"  # inside the source: must not document itself
    return out, atlas.build(source, out)


def _problems(report: atlas.BuildReport) -> dict[str, str]:
    return {item.path: item.kind for item in report.problems}


def test_each_odd_file_is_a_line_in_the_report(built: tuple[Path, atlas.BuildReport]) -> None:
    report = built[1]
    assert _problems(report) == {
        "alias.py": "link",
        "binary.bin": "binary",
        "broken.json": "syntax",
        "broken.py": "syntax",
        "older": "output",
        "huge.txt": "too large",
        "ignored": "ignored",
        "latin.py": "encoding",
        "loop": "link",
        "noise.log": "ignored",
        "null.py": "binary",
        "out_of_tree": "link",
        "pipe.py": "special",
        "self": "link",
    }
    texts = {item.path: item.text for item in report.problems}
    assert "nowhere or in a circle" in texts["self"]
    assert "out of the tree" in texts["out_of_tree"]
    assert "bad\\xff name.py" in (built[0] / "index.md").read_text().replace("\\\\", "\\")
    assert "100,000,000 bytes" in texts["huge.txt"]
    assert "line 1" in texts["broken.py"]


def test_every_other_file_has_its_pages(source: Path, built: tuple[Path, atlas.BuildReport]) -> None:
    out, report = built
    paths = ["pkg/model.py", "empty.py", "latin.py", "cookie.py", "keep.log", "index.md/x_docs.md", odd_tree.NASTY]
    paths.append("bad\udcff name.py")
    for path in [*paths, "sub ~ folder/é.txt", "deep.py", ".gitignore"]:
        for suffix in ("_docs.md", "_kw.md", "_docs.html", "_kw.html", "_source.html"):
            assert (out / file_page(path, suffix)).is_file(), path
    for folder in ("", "pkg", "index.md", "sub ~ folder"):
        for name in ("index", "doc", "sub"):
            assert (out / folder_of(folder) / f"{name}.md").is_file()
            assert (out / folder_of(folder) / f"{name}.html").is_file()
    assert (out / "reading.md").is_file()
    assert report.broken == ()
    assert report.files == len(list(out.rglob("*_kw.md")))


def test_nothing_is_written_outside_the_output(tmp_path: Path) -> None:
    source = odd_tree.build(tmp_path / "source")

    def everything() -> set[str]:
        return {os.path.join(folder, name) for folder, _, names in os.walk(tmp_path) for name in names}

    before = everything()
    atlas.build(source, tmp_path / "out")
    assert all(path.startswith(f"{tmp_path}/out/") for path in everything() - before)
    assert before <= everything()


def test_names_keep_apart_and_inside() -> None:
    names = ["a b", "a~20b", "a%20b", "..", ".", "~2e.", "x" * 300, "x" * 301, "é", "index.md"]
    made = [safe(name) for name in names]
    assert len(set(made)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._+~-]+", name) and name not in (".", "..") for name in made)
    assert folder_of("../../etc") == "~2e./~2e./etc"
    assert safe("index.md", folder=True) != "index.md"
    assert len(safe("x" * 300)) < 200


def test_fences_are_longer_than_any_inside(built: tuple[Path, atlas.BuildReport]) -> None:
    """A docstring's example may have fences of its own."""
    text = "\n".join(fenced(odd_tree.FENCES, "markdown"))
    assert text == "``````markdown\n" + odd_tree.FENCES + "``````"
    assert "`````\nfive" not in (built[0] / "README.md_docs.md").read_text()  # read as a fence, written as one of ours


def test_markup_in_names_and_text_is_shown_not_run(built: tuple[Path, atlas.BuildReport]) -> None:
    out = built[0]
    for page in out.rglob("*.html"):
        text = page.read_text()
        assert "<script>alert" not in text
        assert text.count("<script") == 1  # our own
    page = (out / file_page(odd_tree.NASTY, "_docs.html")).read_text()
    assert html.escape(odd_tree.NASTY, quote=False) in page


def test_encodings_are_said(built: tuple[Path, atlas.BuildReport]) -> None:
    out = built[0]
    assert "| Encoding | unknown, shown as Latin-1 |" in (out / "latin.py_docs.md").read_text()
    assert "| Encoding | latin-1 as its first lines say |" in (out / "cookie.py_docs.md").read_text()
    assert "naïveté" in (out / "latin.py_kw.md").read_text()
    assert "The file is empty." in (out / "empty.py_docs.md").read_text()


def test_what_cannot_be_read_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom no permission stops; so the opening itself is made to fail."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "secret.py").write_text("x = 1\n")
    (tmp_path / "src" / "open.py").write_text("y = 1\n")
    really = open

    def refuse(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith("secret.py"):
            raise PermissionError(13, "Permission denied")
        return really(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(_tree, "open", refuse, raising=False)
    report = atlas.build(tmp_path / "src", tmp_path / "out")
    assert report.files == 1
    assert _problems(report) == {"secret.py": "unreadable"}


@pytest.mark.parametrize(
    ("source", "out", "match"),
    [
        ("nowhere", "out", "SOURCE must be a folder"),
        ("src", "src", "cannot be the source"),
        ("src", ".", "cannot be the source"),
    ],
)
def test_what_is_refused(tmp_path: Path, source: str, out: str, match: str) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(AtlasError, match=match):
        atlas.build(tmp_path / source, tmp_path / out)


def test_the_output_is_not_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.md").write_text("mine")
    with pytest.raises(AtlasError, match="must be new, empty, or written by an earlier run"):
        atlas.build(tmp_path / "src", tmp_path / "out")
    assert (tmp_path / "out" / "index.md").read_text() == "mine"


def test_a_link_planted_in_the_output_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "a.py").write_text("x = 1\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / ".atlas").mkdir(parents=True)
    (tmp_path / "out" / "pkg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AtlasError, match="cannot be a symbolic link"):
        atlas.build(tmp_path / "src", tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []
