"""The jobs of a run, which worker processes do: read files, write their pages, write indexes."""

from __future__ import annotations

import gc
import json
import posixpath
import sys
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sternway.atlas._paths import file_page, folder_page, shown
from sternway.atlas._records import Facts, Keyword, pack, pack_keywords, unpack, unpack_keywords
from sternway.atlas.pages._about import About, Brief
from sternway.atlas.pages._blocks import Page
from sternway.atlas.pages._file_page import file_docs, file_source
from sternway.atlas.pages._html import to_html
from sternway.atlas.pages._index import IndexEntry, file_heads, file_rows, folder_heads, folder_rows, write_index
from sternway.atlas.pages._links import Links, page_of, read_links
from sternway.atlas.pages._markdown import to_markdown
from sternway.atlas.pages._search import SearchSource, shards
from sternway.atlas.pages._sections_map import sections_of
from sternway.atlas.read import _ctags
from sternway.atlas.read._facts import read_facts
from sternway.atlas.read._languages import language_of
from sternway.atlas.read._text import lines_of, read
from sternway.atlas.relate._context import FileContext
from sternway.atlas.relate._modules import ModuleName
from sternway.atlas.relate._usage import UsageSite
from sternway.atlas.run._store import Written, facts_file, write

LARGEST_PAGE = 290_000  # bytes; a longer page about a file is made again, more briefly


class Site(NamedTuple):
    """The source tree and the output folder of a run, the tree's name, and where Markdown finds the source."""

    root: Path
    out: Path
    tree: str
    base: str


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
    """Read files, and store their facts and keywords. ``keys``: the digest of each file's inputs."""

    site: Site
    paths: tuple[str, ...]
    names: tuple[ModuleName | None, ...]
    keys: tuple[str, ...]

    def run(self) -> Done:
        tagged = [path for path in self.paths if language_of(path).parser == "ctags"] if _ctags.version() else []
        records = _ctags.tags(self.site.root, tagged, {path: language_of(path).name for path in tagged})
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
            stored = "\n".join(
                (key, str(len(lines_of(text.text))), pack(facts), pack_keywords(keywords), _indexed(facts), "")
            )
            write(facts_file(self.site.out, path), zlib.compress(stored.encode("ascii"), 3))
        _collect()
        return Done((), tuple(problems))


class Describe(NamedTuple):
    """Write the pages of files, with what is known about them from other files."""

    site: Site
    files: tuple[tuple[str, FileContext, str], ...]  # path, context, digest of inputs

    def run(self) -> Done:
        outputs: list[Output] = []
        problems: list[tuple[str, str, str]] = []
        lines: dict[str, list[str]] = {}
        for path, context, key in self.files:
            language = language_of(path)
            try:
                text = read(self.site.root / path, is_python=language.parser == "ast")
            except OSError as error:
                problems.append((path, "unreadable", f"cannot be read: {error.strerror}"))
                continue
            facts, keywords = load_facts(self.site.out, path)
            excerpts = {site: excerpt(self.site.root, site, lines) for _, sites in context.examples for site in sites}
            defined = {item.name: item for item in reversed(facts.definitions)}
            names, members = dict(context.links), members_of(facts)
            about = About(path, text, language, facts, context, excerpts, names, defined, members)
            outputs += self._pages(about, keywords, key)
        _collect()
        return Done(tuple(outputs), tuple(problems))

    def _pages(self, about: About, keywords: list[Keyword], key: str) -> Iterator[Output]:
        for brief in Brief:
            page = file_docs(about._replace(brief=brief))
            unlinked = about.path if brief else ""
            texts = to_markdown(page, self.site.base, unlinked), to_html(page, self.site.tree)
            if max(len(text.encode("utf-8", "replace")) for text in texts) < LARGEST_PAGE:
                break
        for suffix, text in zip((".md", ".html"), texts, strict=True):
            yield from _write(self.site.out, page.name + suffix, key, text)
        source = file_source(about)
        yield from _write(self.site.out, f"{source.name}.html", key, to_html(source, self.site.tree))
        heads = file_heads(about.path, [section.title for section in page.sections], self.site.base)
        rows = file_rows(about.path, keywords, sections_of(page, (word.name for word in keywords)), self.site.base)
        index = Page(file_page(about.path, "_kw"), about.path, f"Keywords of {shown(about.path)}", (), True)
        base = page_of("source", about.path, ".html").rpartition("/")[2]
        for name, text in write_index(index, self.site.tree, rows, heads, base):
            yield from _write(self.site.out, name, key, text)


def members_of(facts: Facts) -> dict[str, tuple[tuple[str, str, int], ...]]:
    """The members of each class: last part of the name, whole name, line."""
    found: dict[str, dict[str, tuple[str, str, int]]] = {
        item.name: {} for item in facts.definitions if item.kind == "class"
    }
    for item in facts.definitions:
        owner, _, tail = item.name.rpartition(".")
        if owner in found:
            found[owner].setdefault(tail, (tail, item.name, item.line))
    return {owner: tuple(members.values()) for owner, members in found.items()}


def _indexed(facts: Facts) -> str:
    """The definitions of a file that indexes list, stored apart: the folders above it all ask for them."""
    kept = [
        (item.name, item.kind, item.line)
        for item in facts.definitions
        if item.kind != "variable" or "." not in item.name
    ]
    return json.dumps(kept, ensure_ascii=True, separators=(",", ":"))


def excerpt(root: Path, site: UsageSite, lines: dict[str, list[str]]) -> str:
    """The text of a call site, without its indentation."""
    if site.path not in lines:
        try:
            lines[site.path] = lines_of(read(root / site.path, is_python=True).text)
        except OSError:
            lines[site.path] = []
    return textwrap.dedent("\n".join(lines[site.path][site.first - 1 : site.last]))


class Index(NamedTuple):
    """Write the index of a folder and all below it (definitions, without fields), or the search index."""

    site: Site
    folder: str
    paths: tuple[str, ...]
    key: str
    search: bool = False

    def run(self) -> Done:
        if self.search:
            made = shards(self._searched(path) for path in self.paths).items()
            return Done(tuple(plain(self.site.out, f"_site/search/{name}", self.key, text) for name, text in made))
        title = f"Definitions below {shown(self.folder) or self.site.tree}"
        page = Page(folder_page(self.folder, "sub"), self.folder, title, ())
        below = posixpath.commonpath([path.rpartition("/")[0] for path in self.paths] or [self.folder])
        if below != self.folder:
            return self._written(write_index(page, self.site.tree, (), folder_heads(self.folder, below)))
        entries = (
            IndexEntry(name.replace("::", ".").rpartition(".")[2], name, kind, path, line)
            for path in self.paths
            for name, kind, line in json.loads(_lines(self.site.out, path)[4])
        )
        rows = folder_rows(self.folder, entries, self.site.base)
        return self._written(write_index(page, self.site.tree, rows))

    def _written(self, written: Iterable[tuple[str, str]]) -> Done:
        return Done(tuple(out for name, text in written for out in _write(self.site.out, name, self.key, text)))

    def _searched(self, path: str) -> SearchSource:
        facts, keywords = load_facts(self.site.out, path)
        try:
            text = read(self.site.root / path, is_python=language_of(path).parser == "ast").text
        except OSError:
            text = ""
        return SearchSource(path, facts, keywords, text)


Job = Read | Describe | Index


def run(job: Job) -> Done:
    return job.run()


def _collect() -> None:
    """Collect after a job, in a worker process where the collector is off otherwise."""
    if not gc.isenabled():
        gc.collect()


def render(site: Site, page: Page, key: str) -> Iterator[Output]:
    """Write a page as Markdown and as HTML."""
    yield from _write(site.out, f"{page.name}.md", key, to_markdown(page, site.base))
    yield from _write(site.out, f"{page.name}.html", key, to_html(page, site.tree))


def _write(out: Path, page: str, key: str, text: str) -> Iterator[Output]:
    digest, size, changed = write(out / page, text)
    yield Output(page, Written(key, digest, size), read_links(page, text), changed)


def plain(out: Path, path: str, key: str, text: str) -> Output:
    """Write a file without links of its own."""
    digest, size, changed = write(out / path, text)
    return Output(path, Written(key, digest, size), None, changed)


def _lines(out: Path, path: str) -> list[str]:
    return zlib.decompress(facts_file(out, path).read_bytes()).decode("ascii").split("\n")


def load_facts(out: Path, path: str) -> tuple[Facts, list[Keyword]]:
    rows = _lines(out, path)
    return unpack(rows[2]), unpack_keywords(rows[3])


def stored(out: Path, path: str) -> tuple[str, int, str]:
    """The key, the number of lines and the packed facts stored for a file; empty if there are none."""
    try:
        key, lines, facts, *_ = _lines(out, path)
        return key, int(lines), facts
    except (OSError, ValueError, zlib.error):
        return "", 0, ""
