"""The site in a real Chromium, from disk: search finds a symbol and lands on its line; no network is asked."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest

from browser import Browser
from sternway import atlas, split

SOURCE = Path(__file__).parents[2] / "src"
HANGS = 300.0  # seconds after which a page is taken to hang; no test waits that long for a right answer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own source: the demo."""
    out = tmp_path_factory.mktemp("atlas")
    report = atlas.build(SOURCE, out)
    assert report.ok
    assert report.unresolved == 0
    assert not report.problems
    return out


def _path(thing: object) -> str:
    """The source file that defines something, relative to SOURCE."""
    return Path(inspect.getsourcefile(thing)).relative_to(SOURCE).as_posix()


def _wait(browser: Browser, script: str) -> object:
    until = time.monotonic() + HANGS
    while time.monotonic() < until:
        if value := browser.run(script):
            return value
        time.sleep(0.05)
    raise AssertionError(f"never true: {script}")


def test_search_lands_on_the_line_of_a_symbol(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    browser.press("/")
    browser.type("backward_input")
    _wait(browser, "document.querySelectorAll('#found a').length > 0")
    first = browser.run("document.querySelector('#found a').textContent")
    path = _path(split.backward_input)
    text = (SOURCE / path).read_text().splitlines()
    line = next(number for number, row in enumerate(text, 1) if row.startswith("def backward_input"))
    assert first.startswith(f"backward_inputfunction{path}:{line}")
    browser.press("Enter")
    assert _wait(browser, f"location.hash === '#L{line}' && !!document.documentElement?.dataset.ready")
    assert browser.run("decodeURI(location.pathname)").endswith(f"{path}_docs.html")
    top = browser.run(f"document.getElementById('L{line}').getBoundingClientRect().top")
    assert 0 < top < 860
    shown = browser.run("document.querySelector('pre.source').textContent.split('\\n')")
    assert shown[line - 1] == text[line - 1]
    assert shown[: len(text)] == text


def test_search_by_part_of_a_name_by_file_and_for_nothing(browser: Browser, site: Path) -> None:
    browser.open(site / "sternway" / "graph" / "index.html")
    for query, wanted in (
        ("transport", "DistTransport"),
        (Path(_path(split.Pending)).name, Path(_path(split.Pending)).name),
        ("zzqqx", ""),
    ):
        browser.run("document.getElementById('search').focus(); document.getElementById('search').value = ''")
        browser.type(query)
        if wanted:
            names = "[...document.querySelectorAll('#found .name')].map(e => e.textContent)"
            assert _wait(browser, f"{names}.includes('{wanted}')")
        else:
            _wait(browser, "document.getElementById('found').textContent === 'Nothing found.'")
    browser.press("Escape")
    assert browser.run("document.getElementById('found').hidden")


def test_light_and_dark(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(colour)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(colour) != before


def test_sections_and_links_of_a_page(browser: Browser, site: Path) -> None:
    page = f"{_path(split.Pending)}_docs.html"
    browser.open(site / page)
    titles = browser.run("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles[:4] == ["Metadata", "Purpose", "Overview", "Structure"]
    assert titles[-1] == "Original source"
    browser.run("[...document.querySelectorAll('a')].find(e => e.textContent.startsWith('every identifier')).click()")
    assert _wait(
        browser, f"location.pathname.endsWith('{page.replace('_docs', '_kw')}') && !!document.querySelector('dt')"
    )
