"""The jobs of a run, which worker processes do: read files, write their pages, write indexes."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sternway.atlas._paths import file_page, folder_page, shown
from sternway.atlas._records import Facts, pack, pack_keywords, unpack
from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import Items, Page, To, section, sections
from sternway.atlas.pages._file_page import file_docs
from sternway.atlas.pages._html import index_html, to_html
from sternway.atlas.pages._index import (
    SPLIT_ABOVE,
    Entry,
    by_letter,
    file_html,
    file_markdown,
    merge,
    subtree_html,
    subtree_markdown,
)
from sternway.atlas.pages._links import Links, page_of, read_links
from sternway.atlas.pages._markdown import to_markdown
from sternway.atlas.pages._search import shards
from sternway.atlas.read import _ctags
from sternway.atlas.read._facts import read_facts
from sternway.atlas.read._languages import language_of
from sternway.atlas.read._text import lines_of, read
from sternway.atlas.relate._context import FileContext
from sternway.atlas.relate._modules import ModuleName
from sternway.atlas.run._store import Written, facts_file, write


class Site(NamedTuple):
    """The source tree and the output folder of a run, and the tree's name."""

    root: Path
    out: Path
    tree: str


class Output(NamedTuple):
    path: str
    written: Written
    links: Links | None
    changed: bool


class Done(NamedTuple):
    """A job's result: pages written, and problems of files (path, kind, text)."""

    outputs: tuple[Output, ...]
    problems: tuple[tuple[str, str, str], ...] = ()


def start() -> None:
    """Called once in each process: syntax trees are deep, and the cycle collector would scan them again and again."""
    sys.setrecursionlimit(20_000)
    gc.disable()
    gc.freeze()


class Read(NamedTuple):
    """Read files, and write their facts and keyword pages. ``keys``: the digest of each file's inputs."""

    site: Site
    paths: tuple[str, ...]
    names: tuple[ModuleName | None, ...]
    keys: tuple[str, ...]

    def run(self) -> Done:
        tagged = [path for path in self.paths if language_of(path).parser == "ctags"] if _ctags.version() else []
        records = _ctags.tags(self.site.root, tagged, {path: language_of(path).name for path in tagged})
        outputs: list[Output] = []
        problems: list[tuple[str, str, str]] = []
        for path, name, key in zip(self.paths, self.names, self.keys, strict=True):
            language = language_of(path)
            try:
                text = read(self.site.root / path, is_python=language.parser == "ast")
            except OSError as error:
                problems.append((path, "unreadable", f"cannot be read: {error.strerror}"))
                continue
            if text.problem:
                problems.append((path, "encoding", text.problem))
            module, package = name or ("", "")
            facts, keywords = read_facts(text.text, language, module, package, records.get(path))
            if facts.problem:
                problems.append((path, "syntax" if facts.problem != _ctags.MISSING else "no parser", facts.problem))
            stored = "\n".join((key, str(len(lines_of(text.text))), pack(facts), pack_keywords(keywords), ""))
            write(facts_file(self.site.out, path), stored)
            title = f"Keywords of {shown(path)}"
            body = index_html(file_page(path, "_kw"), path, title, self.site.tree, file_html(path, keywords), True)
            outputs += _write(self.site.out, page_of("kw", path, ".md"), key, file_markdown(path, keywords))
            outputs += _write(self.site.out, page_of("kw", path, ".html"), key, body)
        _collect()
        return Done(tuple(outputs), tuple(problems))


class Describe(NamedTuple):
    """Write the pages of files, with what is known about them from other files."""

    site: Site
    files: tuple[tuple[str, FileContext, str], ...]  # path, context, digest of inputs

    def run(self) -> Done:
        outputs: list[Output] = []
        problems: list[tuple[str, str, str]] = []
        for path, context, key in self.files:
            language = language_of(path)
            try:
                text = read(self.site.root / path, is_python=language.parser == "ast")
            except OSError as error:
                problems.append((path, "unreadable", f"cannot be read: {error.strerror}"))
                continue
            facts = load_facts(self.site.out, path)
            outputs += render(self.site, file_docs(About(path, text, language, facts, context)), key)
        _collect()
        return Done(tuple(outputs), tuple(problems))


class Index(NamedTuple):
    """Write the keyword index of a folder and all below it, or with ``search`` the search index."""

    site: Site
    folder: str
    paths: tuple[str, ...]
    key: str
    search: bool = False

    def run(self) -> Done:
        entries = merge((path, load_keywords(self.site.out, path)) for path in self.paths)
        if self.search:
            made = shards(entries, list(self.paths)).items()
            return Done(tuple(plain(self.site.out, f"_site/search/{name}", self.key, text) for name, text in made))
        letters = by_letter(entries)
        title = f"Keywords below {shown(self.folder) or self.site.tree}"
        if len(entries) <= SPLIT_ABOVE:
            return Done(tuple(self._pages("sub", title, letters)))
        outputs = [
            output
            for letter, group in letters.items()
            for output in self._pages(f"sub_{letter.replace('-', '')}", f"{title}: {letter}", {letter: group})
        ]
        return Done((*outputs, *self._overview(title, {letter: len(group) for letter, group in letters.items()})))

    def _pages(self, name: str, title: str, letters: dict[str, list[Entry]]) -> Iterator[Output]:
        page = folder_page(self.folder, name)
        text = subtree_markdown(f"{page}.md", title, letters)
        yield from _write(self.site.out, f"{page}.md", self.key, text)
        body = subtree_html(f"{page}.html", letters)
        text = index_html(page, self.folder, title, self.site.tree, body, False)
        yield from _write(self.site.out, f"{page}.html", self.key, text)

    def _overview(self, title: str, letters: dict[str, int]) -> Iterator[Output]:
        items = tuple(
            (To(f"sub_{letter.replace('-', '')}", self.folder, letter), f": {count:,} entries")
            for letter, count in letters.items()
        )
        page = Page(folder_page(self.folder, "sub"), self.folder, title, sections(section("Letters", Items(items))))
        yield from render(self.site, page, self.key)


Job = Read | Describe | Index


def run(job: Job) -> Done:
    return job.run()


def _collect() -> None:
    """Collect after a job, in a worker process where the collector is off otherwise."""
    if not gc.isenabled():
        gc.collect()


def render(site: Site, page: Page, key: str) -> Iterator[Output]:
    """Write a page as Markdown and as HTML."""
    yield from _write(site.out, f"{page.name}.md", key, to_markdown(page))
    yield from _write(site.out, f"{page.name}.html", key, to_html(page, site.tree))


def _write(out: Path, page: str, key: str, text: str) -> Iterator[Output]:
    digest, size, changed = write(out / page, text)
    yield Output(page, Written(key, digest, size), read_links(page, text), changed)


def plain(out: Path, path: str, key: str, text: str) -> Output:
    """Write a file without links of its own."""
    digest, size, changed = write(out / path, text)
    return Output(path, Written(key, digest, size), None, changed)


def _lines(out: Path, path: str) -> list[str]:
    return facts_file(out, path).read_text("utf-8").split("\n")


def load_facts(out: Path, path: str) -> Facts:
    return unpack(_lines(out, path)[2])


def load_keywords(out: Path, path: str) -> list[tuple[str, str, int]]:
    rows: list[tuple[str, str, int]] = json.loads(_lines(out, path)[3])
    return rows


def stored(out: Path, path: str) -> tuple[str, int, str]:
    """The key, the number of lines and the packed facts stored for a file; empty if there are none."""
    try:
        key, lines, facts, *_ = _lines(out, path)
        return key, int(lines), facts
    except (OSError, ValueError):
        return "", 0, ""
