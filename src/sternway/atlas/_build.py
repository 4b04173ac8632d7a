"""``build`` writes the pages of a tree; ``check`` says whether they are up to date."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sternway.atlas._report import BuildReport
from sternway.atlas.pages._links import BrokenLink, Links, read_links
from sternway.atlas.pages._links import check as check_links
from sternway.atlas.read._tree import FileProblem
from sternway.atlas.run import _measure
from sternway.atlas.run._pool import JobPool, Progress
from sternway.atlas.run._run import SiteBuild, source_lines
from sternway.atlas.run._store import SiteManifest, digest, generator
from sternway.atlas.run._work import stored
from sternway.errors import AtlasError


def build(
    source: Path | str,
    out: Path | str,
    *,
    include: Iterable[str] = (),
    source_url: str = "",
    jobs: int | None = None,
    measure: str | None = None,
    measure_seconds: float = 300.0,
    progress: Progress | None = None,
) -> BuildReport:
    """Write pages for every text file and folder of a source tree.

    Example:
        >>> report = build("src", "build/atlas")  # doctest: +SKIP
        >>> report.ok  # doctest: +SKIP
        True

    Args:
        source: the root of the tree. Nothing in it is imported or run, unless ``measure`` asks for it.
        out: the folder for pages: new, empty, or written by an earlier run.
        include: patterns as in a ``.gitignore``; if given, only files that match one get pages.
        source_url: where a code host shows the source, such as ``https://host/owner/repo/blob/main/src``. Links to
            lines in Markdown pages start with it; without it they lead to the source files, relative to the pages.
        jobs: the number of processes; the number of cores if None.
        measure: ``path.py:function``, which returns a model and a sample, or a loss and its model. It runs in a
            process of its own.
        measure_seconds: the time limit for that process.
        progress: called with a phase's name, how many of its jobs are done, and how many there are.

    Raises:
        AtlasError: the source is not a folder, or the output folder has other files in it.
    """
    start = time.perf_counter()
    run = SiteBuild(Path(source), Path(out), tuple(include), checked_url(source_url))
    measured = _measure.measure(measure, run.tree.root, run.site.out, measure_seconds) if measure else run.measured()
    before = run.before
    if before is not None and run.unchanged(before, measured):
        return report(run, before, kept=len(before.pages), seconds=time.perf_counter() - start)
    run.prepare()
    with JobPool(jobs, progress) as pool:
        run.read(pool)
        run.describe(pool, measured)
    manifest, removed = run.finish(measured)
    return report(
        run,
        manifest,
        written=run.made,
        kept=len(run.pages) - run.made,
        removed=removed,
        seconds=time.perf_counter() - start,
    )


def checked_url(address: str) -> str:
    """The address of the source, which pages will link to."""
    if address and (not address.startswith(("https://", "http://")) or any(char in address for char in ' "<>()#')):
        raise AtlasError(
            "--source-url must be the address of a folder on a code host",
            got=repr(address),
            fix="for example https://github.com/owner/repo/blob/main/src",
        )
    return address


def check(source: Path | str, out: Path | str, *, include: Iterable[str] = (), source_url: str = "") -> BuildReport:
    """Compare pages with their source, and check every link of the pages on disk; nothing is written.

    Args:
        source: the root of the tree.
        out: the folder that ``build`` wrote.
        include: as for ``build``.
        source_url: as for ``build``.

    Returns:
        A report whose ``stale`` says what differs, one line each, and whose ``broken`` lists links without a target.
    """
    start = time.perf_counter()
    run = SiteBuild(Path(source), Path(out), tuple(include), checked_url(source_url))
    if run.before is None:
        manifest = SiteManifest(generator(), "", run.sources, {}, (), (), 0, {}, 0)
        stale: tuple[str, ...] = ("there are no pages yet",)
        return report(run, manifest, stale=stale, seconds=time.perf_counter() - start)
    links: dict[str, Links] = {}
    stale = tuple(_stale(run, run.before, links))
    lines = {path: stored(run.site.out, path)[1] for path in run.before.sources}
    others = [page for page in run.before.pages if page not in links]
    broken = check_links(links, others, source_lines(run.site.base, lines))
    manifest = run.before._replace(broken=tuple((item.page, item.target) for item in broken))
    return report(run, manifest, kept=len(manifest.pages), stale=stale, seconds=time.perf_counter() - start)


def _stale(run: SiteBuild, before: SiteManifest, links: dict[str, Links]) -> Iterator[str]:
    if before.generator != generator():
        yield "another version of the program wrote the pages"
    if before.options != digest(run.options, run.measured()):
        yield "the pages were written with other options, or a measured file has changed"
    for path in sorted({*before.sources, *run.sources}):
        if path not in run.sources:
            yield f"{path} is gone"
        elif path not in before.sources:
            yield f"{path} is new"
        elif before.sources[path] != run.sources[path]:
            yield f"{path} has changed"
    for page, written in sorted(before.pages.items()):
        try:
            data = (run.site.out / page).read_bytes()
        except OSError:
            yield f"the page {page} is missing"
            continue
        if hashlib.sha256(data).hexdigest() != written.digest:
            yield f"the page {page} was changed by hand"
        if page.endswith((".md", ".html")):
            links[page] = read_links(page, data.decode("utf-8", "replace"))


def report(
    run: SiteBuild,
    manifest: SiteManifest,
    *,
    written: int = 0,
    kept: int = 0,
    removed: int = 0,
    stale: tuple[str, ...] = (),
    seconds: float,
) -> BuildReport:
    """The report of a run, from its manifest."""
    return BuildReport(
        source=str(run.tree.root),
        out=str(run.site.out),
        files=len(manifest.sources),
        folders=len(run.tree.folders),
        lines=manifest.lines,
        languages=manifest.languages,
        written=written,
        kept=kept,
        removed=removed,
        problems=tuple(FileProblem(*row) for row in manifest.problems),
        broken=tuple(BrokenLink(*row) for row in manifest.broken),
        stale=stale,
        unresolved=manifest.unresolved,
        seconds=seconds,
    )
