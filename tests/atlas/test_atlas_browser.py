"""The site in a real Chromium, from disk: search finds a symbol and lands on its line; no network is asked."""

from __future__ import annotations

import inspect
import json
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
        if value := browser.look(script):
            return value
        time.sleep(0.05)
    raise AssertionError(f"never true: {script}")


def _search(browser: Browser, text: str) -> list[str]:
    """The first results of a search: name, kind and the rest, joined."""
    browser.run("document.getElementById('search').focus(); document.getElementById('search').value = ''")
    browser.type(text)
    _wait(browser, f"(document.documentElement.dataset.searched ?? '').startsWith({text!r} + ' ')")
    found = "[...document.querySelectorAll('#found li a')].map(e => [...e.children].map(c => c.textContent).join('|'))"
    return browser.run(found)


def test_search_lands_on_a_definition_and_one_click_later_on_its_line(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    path = _path(split.backward_input)
    text = (SOURCE / path).read_text().splitlines()
    line = next(number for number, row in enumerate(text, 1) if row.startswith("def backward_input"))
    first = _search(browser, "backward_input")[0].split("|")
    assert (first[0], first[1], first[-1]) == ("backward_input", "function", f"{path}:{line}")
    assert first[2].startswith("Compute the gradients of inputs now")  # a line of context
    browser.press("Enter")
    assert _wait(browser, "location.hash === '#d-backward_input' && !!document.documentElement?.dataset.ready")
    assert browser.run("decodeURI(location.pathname)").endswith(f"{path}_docs.html")
    top = browser.run("document.getElementById('d-backward_input').getBoundingClientRect().top")
    assert 0 < top < 860
    browser.run(f"[...document.querySelectorAll('main a')].find(e => e.href.endsWith('_source.html#L{line}')).click()")
    assert _wait(browser, f"location.hash === '#L{line}' && !!document.documentElement?.dataset.ready")
    shown = browser.run("document.querySelector('pre.source').textContent.split('\\n')")
    assert shown[: len(text)] == text


def test_search_takes_several_words_mistakes_files_and_kinds(browser: Browser, site: Path) -> None:
    browser.open(site / "sternway" / "graph" / "index.html")
    assert _search(browser, "input backward")[0].startswith("backward_input|function")
    assert _search(browser, "transport dist")[0].startswith("DistTransport|class")
    assert _search(browser, "trasnport")[0].startswith("Transport|class")  # two letters swapped
    name = Path(_path(split.Pending)).name
    assert any(row.startswith(f"{name}|file") for row in _search(browser, name))
    documented = _search(browser, "zero bubble paper")
    assert documented  # words of docstrings, in no name
    assert _search(browser, "zzqqx") == []
    assert browser.run("document.querySelector('#found p').textContent") == "Nothing found."
    browser.run("document.getElementById('search').value = ''")
    before = {row.split("|")[1] for row in _search(browser, "pending")}
    assert {"class", "method", "file", "use"} <= before
    browser.run("delete document.documentElement.dataset.searched")
    browser.run("[...document.querySelectorAll('.kinds button')].find(e => e.textContent === 'Classes').click()")
    _wait(browser, "!!document.documentElement.dataset.searched")
    kinds = browser.run("[...new Set([...document.querySelectorAll('#found .kind')].map(e => e.textContent))]")
    assert kinds == ["class"]
    browser.press("Escape")
    assert browser.run("document.getElementById('found').hidden")


EVERY_NAME = """
(async () => {
  const index = new SearchIndex(async () => {});
  const fill = (files, names, kinds) => index.names([], files.map((path) => [path, "", ""]), names.join("\\n"), kinds,
    names.map((_, i) => i % files.length), names.map((_, i) => i + 1), names.map(() => "").join("\\n"));
  const names = "Graph Graph.capture graph_of _graph Path.subgraph Graph2.run capture Tape.recapture".split(" ");
  fill(["a.py", "graph/b.py"], names, "cmffmmfm");
  const found = {};
  for (const query of QUERIES) found[query] = (await index.find(query, "")).hits.map((hit) => hit.name);
  fill(["a.py"], Array.from({ length: 300 }, (_, i) => `thing_${i}`), "f".repeat(300));
  const all = await index.find("thing", "");
  return [found, all.total, all.hits.length, all.hits[0].name];
})()
"""


def test_search_finds_every_name_with_the_words_in_it(browser: Browser, site: Path) -> None:
    """Against a list made by hand: the whole name, its start, a part, inside, the class around; then a file's path."""
    browser.open(site / "index.html")
    wanted = {
        "graph": ["Graph", "_graph", "graph_of", "Path.subgraph", "b.py", "Graph2.run", "Graph.capture"],
        "capture": ["capture", "Graph.capture", "Tape.recapture"],
        "capture graph": ["Graph.capture", "Tape.recapture"],
        "capture grahp": [],
        "captrue": ["capture", "Graph.capture"],
        "zzz": [],
    }
    found, total, shown, first = browser.run(EVERY_NAME.replace("QUERIES", json.dumps(list(wanted))))
    assert {query: set(names) for query, names in found.items()} == {
        query: set(names) for query, names in wanted.items()
    }
    assert found["graph"][:3] == ["Graph", "_graph", "graph_of"]
    assert found["capture"] == wanted["capture"]
    assert (total, shown, first) == (300, 50, "thing_0")


def test_light_and_dark(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(colour)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(colour) != before


def test_sections_contents_and_links_of_a_page(browser: Browser, site: Path) -> None:
    page = f"{_path(split.Pending)}_docs.html"
    browser.open(site / page)
    titles = browser.run("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles[:4] == ["Overview", "Detailed breakdown", "Architecture and design", "Dependencies"]
    assert titles[-1] == "File"
    contents = browser.run("[...document.querySelectorAll('aside > ul > li > a')].map(e => e.textContent)")
    assert contents == titles
    browser.run("[...document.querySelectorAll('aside a')].find(e => e.textContent === 'Dependencies').click()")
    assert _wait(browser, "document.querySelector('aside a.now')?.textContent === 'Dependencies'")
    assert browser.run("document.querySelectorAll('svg.diagram a').length") > 3
    browser.run("document.querySelector('svg.diagram a').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert _wait(browser, f"!location.pathname.endsWith('{page}') && !!document.documentElement?.dataset.ready")
    browser.open(site / page)
    browser.run("[...document.querySelectorAll('a')].find(e => e.textContent === 'Keywords').click()")
    keywords = page.replace("_docs", "_kw")
    assert _wait(browser, f"location.pathname.endsWith('{keywords}') && !!document.querySelector('dt')")
    browser.run("document.querySelector('dd a').click()")
    source = page.replace("_docs", "_source")
    assert _wait(browser, f"location.pathname.endsWith('{source}') && location.hash.startsWith('#L')")


def test_the_page_is_for_reading(browser: Browser, site: Path) -> None:
    """Lines of at most 100 characters; on a phone nothing is wider than the screen."""
    page = site / f"{_path(split.Pending)}_docs.html"
    browser.open(page)
    width, size = browser.run(
        "[document.querySelector('main').clientWidth, parseFloat(getComputedStyle(document.body).fontSize)]"
    )
    assert width / (size / 2) <= 110
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    try:
        for path in (page, site / "index.html", site / "sternway" / "split" / "index.html"):
            browser.open(path)
            assert browser.run("document.documentElement.scrollWidth") <= 390, path
            assert browser.run("getComputedStyle(document.querySelector('aside') ?? document.body).display") in (
                "none",
                "block",
            )
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
