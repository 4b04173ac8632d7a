"""The playground of the documentation site, opened from disk in Chromium: Python runs in it, and agrees with ours."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from sternway import schedule

SITE = Path(os.environ.get("STERNWAY_SITE", ""))
pytestmark = pytest.mark.skipif(
    "STERNWAY_SITE" not in os.environ, reason="no documentation site was built: make docs builds it and runs this"
)
SIMULATOR = "document.getElementById('simulator')"


def _ready(browser: Browser) -> None:
    until = time.monotonic() + 300
    while (state := browser.look(f"{SIMULATOR} && {SIMULATOR}.dataset.state")) != "ready":
        assert state != "failed", browser.run(f"{SIMULATOR}.querySelector('.status').textContent")
        assert time.monotonic() < until, f"not ready after five minutes: {state}; {browser.errors}"
        time.sleep(0.05)


def _table(browser: Browser) -> dict[str, list[str]]:
    rows = browser.run(
        f"[...{SIMULATOR}.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent))",
    )
    return {name: cells for name, *cells in rows}


def _expected(costs: schedule.Costs, ranks: int, microbatches: int, limit: float) -> dict[str, list[str]]:
    numbers: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches}
    plans = {name: schedule.make(name, **numbers) for name in schedule.names()}
    for name, stages in (("search", 1), ("search-v", 2)):
        plans[name] = schedule.search(costs, **numbers, memory_limit=limit, stages_per_rank=stages)
    rows = {}
    for name, plan in plans.items():
        t = plan.simulate(costs)
        fits = "yes" if t.peak_memory <= limit + 1e-9 else "no"
        rows[name] = [f"{t.makespan:.2f}", f"{t.period:.2f}", f"{t.bubble_rate:.1%}", f"{t.peak_memory:.2f}", fits]
    return rows


def test_python_runs_and_sliders_change_the_table(browser: Browser) -> None:
    browser.call("Page.navigate", url=(SITE / "playground.html").resolve().as_uri())
    _ready(browser)
    assert _table(browser) == _expected(schedule.Costs(F=1.0, I=1.0, W=1.0), 4, 8, 4)
    assert "zb-v" in browser.run(f"{SIMULATOR}.querySelector('.drawing svg title').textContent")

    browser.run(f"{SIMULATOR}.querySelector('[name=W]').focus()")
    for _ in range(4):
        browser.press("ArrowLeft")
    _ready(browser)
    assert browser.run(f"{SIMULATOR}.querySelector('[name=W] + output').textContent") == "0.6"
    assert _table(browser) == _expected(schedule.Costs(F=1.0, I=1.0, W=0.6), 4, 8, 4)


def test_keyboard_and_width(browser: Browser) -> None:
    browser.call("Page.navigate", url=(SITE / "playground.html").resolve().as_uri())
    _ready(browser)
    browser.run(f"{SIMULATOR}.querySelector('tr[data-name=gpipe] button').focus()")
    browser.press("Enter")
    assert browser.run(f"{SIMULATOR}.querySelector('.drawing svg title').textContent").startswith("gpipe: 4 ranks")
    assert browser.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    for width in (800, 1600):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.call("Emulation.clearDeviceMetricsOverride")
