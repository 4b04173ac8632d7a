"""From a source tree to its pages: read what changed, relate the files, write the pages that differ.

    walk ─▶ hash ─▶ read (facts, keyword pages) ─▶ relate ─▶ describe, folders, indexes ─▶ check links ─▶ manifest
             │          in processes                 here         in processes
             └─ the same as last time: nothing is written

A page is made again if the digest of all it is made from differs from the manifest's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sternway.atlas._paths import folder_of, source_link
from sternway.atlas._records import Facts, unpack
from sternway.atlas.pages._assets import assets
from sternway.atlas.pages._backward_page import backward_page
from sternway.atlas.pages._folder_page import Folder, TreeFacts
from sternway.atlas.pages._links import Links, check
from sternway.atlas.pages._overview_pages import FolderOverview, reading_pages
from sternway.atlas.read._tree import MARK, FileProblem, Tree, walk
from sternway.atlas.relate._context import Relations, relate
from sternway.atlas.relate._history import co_changes, head
from sternway.atlas.relate._modules import names
from sternway.atlas.relate._start import reading_order
from sternway.atlas.run import _measure
from sternway.atlas.run._pool import JobPool
from sternway.atlas.run._store import (
    SiteManifest,
    Written,
    digest,
    facts_file,
    generator,
    load,
    load_links,
    save,
    save_links,
)
from sternway.atlas.run._work import Describe, Done, Index, Output, Read, Site, plain, render, stored
from sternway.errors import AtlasError

_CHUNK = 300_000  # bytes of source in one job
_SMALL = 1_500_000  # bytes of source below which starting processes costs more than it gives
_ABOUT_PAGES = ("encoding", "syntax", "no parser")  # problems of files that have a page all the same


class SiteBuild:
    """One run: ``prepare``, ``read``, ``describe``, ``finish``."""

    def __init__(self, source: Path, out: Path, include: tuple[str, ...], source_url: str = "") -> None:
        self.tree: Tree = walk(source, out, include)
        base = source_url or os.path.relpath(self.tree.root, out.resolve()).replace(os.sep, "/")
        self.site = Site(self.tree.root, out.resolve(), self.tree.root.name or "/", base)
        if self.tree.root == self.site.out or self.tree.root.is_relative_to(self.site.out):
            raise AtlasError(
                "--out cannot be the source or a folder that contains it", got=str(out), fix="choose another folder"
            )
        self.options = digest(json.dumps(include), self.site.tree, base, head(self.tree.root))
        self.problems: list[FileProblem] = list(self.tree.problems)
        self.sources = dict(self._hashes())
        self.names = names(self.tree.root, self.sources)
        self.before = load(self.site.out)
        self.old_generator = self.before.generator if self.before is not None else ""
        usable = self.before is not None and self.before.generator == generator()
        self.old: dict[str, list[str]] = defaultdict(list)  # pages by the digest of their inputs
        self.old_pages: dict[str, Written] = self.before.pages if self.before is not None and usable else {}
        for page, written in self.old_pages.items():
            self.old[written.inputs].append(page)
        self.old_links: dict[str, Links] | None = None
        self.pages: dict[str, Written] = {}
        self.links: dict[str, Links] = {}
        self.made = 0
        self.keys: dict[str, str] = {}
        self.facts: dict[str, Facts] = {}
        self.lines: dict[str, int] = {}
        self.whole = Relations({}, (), {}, (), {})

    def _hashes(self) -> Iterator[tuple[str, str]]:
        for entry in self.tree.files:
            try:
                with open(self.tree.root / entry.path, "rb") as file:
                    yield entry.path, hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                self.problems.append(FileProblem(entry.path, "unreadable", f"cannot be read: {error.strerror}"))

    @property
    def small(self) -> bool:
        return sum(entry.size for entry in self.tree.files) < _SMALL

    def measured(self) -> str:
        """What an earlier run measured, if the measured files have not changed."""
        return _measure.kept(self.site.out, self.sources)

    def unchanged(self, before: SiteManifest, measured: str) -> bool:
        said = {(item.path, item.kind, item.text) for item in self.problems}
        return (
            before.generator == generator()
            and before.options == digest(self.options, measured)
            and before.sources == self.sources
            and {row for row in before.problems if row[1] not in _ABOUT_PAGES} == said
            and all(self._intact(page, written) for page, written in before.pages.items())
        )

    def _intact(self, page: str, written: Written) -> bool:
        try:
            return os.stat(self.site.out / page, follow_symlinks=False).st_size == written.size
        except OSError:
            return False

    def prepare(self) -> None:
        """Make the output folder, and check that nothing in it links elsewhere."""
        out = self.site.out
        try:
            if out.exists() and not (out / MARK).is_dir() and any(out.iterdir()):
                raise AtlasError(
                    "--out must be new, empty, or written by an earlier run",
                    got=f"{out}, which has other files",
                    fix="choose another, or empty it",
                )
            (out / MARK).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AtlasError(
                "--out must be a folder that can be written", got=str(error), fix="choose another"
            ) from None
        for folder in {"_site", MARK, *map(folder_of, self.tree.folders)}:
            path = out / folder
            if folder and path.is_symlink():
                raise AtlasError(
                    "a folder of the output cannot be a symbolic link",
                    got=f"{path}, which is one",
                    fix="remove it and run again",
                )

    def _kept(self, key: str) -> bool:
        """Keep the pages of an earlier run that were made from the same inputs; False if there are none."""
        group = self.old.get(key)
        if not group or not all(self._intact(page, self.old_pages[page]) for page in group):
            return False
        if self.old_links is None:
            self.old_links = load_links(self.site.out)
        for page in group:
            self.pages[page] = self.old_pages[page]
            if page in self.old_links:
                self.links[page] = self.old_links[page]
        return True

    def _take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.pages[output.path] = output.written
            if output.links is not None:
                self.links[output.path] = output.links
            self.made += output.changed

    def _finished(self, done: Done) -> None:
        self._take(done.outputs)
        for path, kind, text in done.problems:
            self.problems.append(FileProblem(path, kind, text))
            if kind == "unreadable":
                self.sources.pop(path, None)

    def read(self, pool: JobPool) -> None:
        """Read every new or changed file: its facts and its keyword page."""
        sizes = {entry.path: entry.size for entry in self.tree.files}
        wanted = []
        old_problems = {row[0]: row for row in (self.before.problems if self.before else ()) if row[1] in _ABOUT_PAGES}
        for path, source in self.sources.items():
            module = self.names.get(path)
            key = self.keys[path] = digest("read", path, source, *(module or ("", "")), self.site.tree)
            if self.old_generator != generator() or stored(self.site.out, path)[0] != key:
                wanted.append(path)
            elif path in old_problems:
                self.problems.append(FileProblem(*old_problems[path]))
        wanted.sort(key=lambda path: (-sizes[path], path))
        jobs = [
            Read(self.site, chunk, tuple(map(self.names.get, chunk)), tuple(self.keys[path] for path in chunk))
            for chunk in _chunks(wanted, sizes)
        ]
        for done in pool.run("reading", jobs, small=self.small):
            self._finished(done)

    def describe(self, pool: JobPool, measured: str) -> None:
        """Write the pages of files and folders, and the indexes."""
        for path in sorted(self.sources):
            _, self.lines[path], text = stored(self.site.out, path)
            self.facts[path] = unpack(text)
        together = co_changes(self.tree.root, self.sources)
        whole = self.whole = _measure.spread(measured, relate(self.facts, self.names, together))
        jobs: list[Describe | Index] = [*self._index_jobs()]
        waiting: list[tuple[str, str]] = []
        for path, context in whole.contexts.items():
            shown = {site.path for _, sites in context.examples for site in sites}
            quoted = [self.sources[path] for path in sorted(shown)]
            key = digest("docs", self.keys[path], self.site.base, json.dumps(context), *quoted)
            if not self._kept(key):
                waiting.append((path, key))
        sizes = {entry.path: entry.size for entry in self.tree.files}
        keys = dict(waiting)
        ordered = sorted(keys, key=lambda path: (-sizes[path], path))
        jobs += [
            Describe(self.site, tuple((path, whole.contexts[path], keys[path]) for path in chunk))
            for chunk in _chunks(ordered, sizes)
        ]
        self._folders(measured)
        self._shared(measured)
        for done in pool.run("writing", jobs, small=self.small):
            self._finished(done)

    def _folders(self, measured: str) -> None:
        problems = sorted(set(self.problems))
        order = reading_order(self.whole, self.facts)
        known = TreeFacts(self.site.tree, self.facts, self.lines, self.whole, problems, self.tree.folders, order)
        folders = [Folder(known, path) for path in self.tree.folders]
        for page in [
            *(folder.index() for folder in folders),
            *(FolderOverview(folder).page() for folder in folders),
            *reading_pages(known),
            backward_page(known, measured),
        ]:
            key = digest("folder", self.site.tree, self.site.base, repr(page))
            if not self._kept(key):
                self._take(render(self.site, page, key))

    def _shared(self, measured: str) -> None:
        """Write the shared style sheet and script, and the drawing of the measured graph."""
        for path, text in {**assets(), **_measure.pages(measured)}.items():
            key = digest("asset", path, text)
            if not self._kept(key):
                self._take([plain(self.site.out, path, key, text)])

    def _index_jobs(self) -> Iterator[Index]:
        """The indexes that changed; the longest job, the index of the whole tree, comes first."""
        for folder in self.tree.folders:
            start = f"{folder}/" if folder else ""
            paths = tuple(path for path in sorted(self.sources) if path.startswith(start))
            inputs = [part for path in paths for part in (path, self.keys[path])]
            for kind in ("sub", "search") if not folder else ("sub",):
                key = digest(kind, folder, self.site.base, *inputs)
                if not self._kept(key):
                    yield Index(self.site, folder, paths, key, search=kind == "search")

    def finish(self, measured: str) -> tuple[SiteManifest, int]:
        """Remove pages without a source, check every link, and write the manifest."""
        removed = [page for page in (self.before.pages if self.before else {}) if page not in self.pages]
        for page in removed:
            _remove(self.site.out, self.site.out / page)
        for path in self.before.sources if self.before else ():
            if path not in self.sources:
                _remove(self.site.out, facts_file(self.site.out, path))
        others = [page for page in self.pages if page not in self.links]
        broken = check(self.links, others, source_lines(self.site.base, self.lines))
        _measure.keep(self.site.out, measured)
        save_links(self.site.out, self.links)
        manifest = SiteManifest(
            generator(),
            digest(self.options, measured),
            self.sources,
            self.pages,
            tuple(sorted({(item.path, item.kind, item.text) for item in self.problems})),
            tuple((item.page, item.target) for item in broken),
            sum(self.lines.values()),
            dict(sorted(Counter(known.language for known in self.facts.values()).items())),
            sum(context.imports.count("unresolved") for context in self.whole.contexts.values()),
        )
        save(self.site.out, manifest)
        return manifest, len(removed)


def source_lines(base: str, lines: Mapping[str, int]) -> dict[str, int]:
    """Source files as the links of Markdown pages name them, and how many lines they have."""
    return {source_link("index.md", base, path): max(count, 1) for path, count in lines.items()}


def _chunks(paths: list[str], sizes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """Split files into chunks of about ``_CHUNK`` bytes."""
    chunk: list[str] = []
    total = 0
    for path in paths:
        chunk.append(path)
        total += sizes[path]
        if total >= _CHUNK:
            yield tuple(chunk)
            chunk, total = [], 0
    if chunk:
        yield tuple(chunk)


def _remove(out: Path, path: Path) -> None:
    """Remove a page, and the folders that are empty without it."""
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == out:
            break
        try:
            folder.rmdir()
        except OSError:
            break
