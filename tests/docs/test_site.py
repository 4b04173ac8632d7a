"""The documentation site that ``make docs`` built: every link and anchor leads somewhere, and it works from disk."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from browser import Browser
from pages import ROOT

SITE = Path(os.environ.get("STERNWAY_SITE", ""))
built = pytest.mark.skipif(
    "STERNWAY_SITE" not in os.environ, reason="no documentation site was built: make docs builds it and runs this"
)


class _Page(HTMLParser):
    """What a page links to, and the places in it that others can link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links += [value for name in ("href", "src") if (value := values.get(name))]


def test_every_page_is_in_the_contents() -> None:
    """``make docs`` fails on a page that is not; this needs no site."""
    contents = (ROOT / "mkdocs.yml").read_text()
    guides = [path.name for path in (ROOT / "docs").glob("*.md")]
    results = [path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*/README.md")]
    assert [page for page in (*guides, *results) if f" {page}\n" not in contents] == []


@built
def test_every_link_leads_somewhere() -> None:
    pages = {path: _Page(path.read_text()) for path in SITE.rglob("*.html")}
    assert len(pages) > 40
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # it is served for any address, so its links are from the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                broken.append(f"{path.relative_to(SITE)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                broken.append(f"{path.relative_to(SITE)}: no place {link}")
    assert broken == []


@built
def test_every_public_name_is_in_the_reference() -> None:
    for room in ("pipeline", "schedule", "split", "saved", "graph", "hooks", "state", "viewer"):
        module = importlib.import_module(f"sternway.{room}")
        places = _Page((SITE / "api" / f"{room}.html").read_text()).places
        assert {f"sternway.{room}.{name}" for name in module.__all__} <= places


@built
@pytest.mark.parametrize("width", [800, 1600])
@pytest.mark.parametrize("page", ["index.html", "concepts.html", "api/pipeline.html", "status.html"])
def test_pages_fit_their_window(browser: Browser, page: str, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    _go(browser, page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.call("Emulation.clearDeviceMetricsOverride")


@built
def test_search_works_from_disk(browser: Browser) -> None:
    _go(browser, "index.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    for letter in "bubble":
        browser.press(letter)
    _wait(browser, "document.querySelectorAll('.md-search-result__item').length > 2")


def _go(browser: Browser, page: str) -> None:
    browser.call("Page.navigate", url=(SITE / page).resolve().as_uri())
    _wait(browser, f"location.href.endsWith('{page}') && document.readyState === 'complete'")


def _wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 120
    while not browser.look(condition):
        assert time.monotonic() < until, f"not so after two minutes: {condition}; {browser.errors}"
        time.sleep(0.05)


def _script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_that_are_made() -> None:
    for name, text in _script("docs/images/make.py").pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text() == text, f"{name}: run python docs/images/make.py"


def test_a_changed_package_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = _script("docs/site/vendor.py")
    monkeypatch.setattr(vendor, "KEPT", tmp_path)
    (tmp_path / f"pyodide-{vendor.PACKAGES['pyodide'][0]}.tgz").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"must have the SHA-512 .*; got .* Fix: remove"):
        vendor.file_of("pyodide", "pyodide.js")
