"""Timelines in a real Chromium: zoom, pan, choose and select by mouse and by keys, at any width, light and dark."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from sternway import schedule, viewer
from sternway.schedule import Costs
from sternway.schedule.formats import lane_run

VIEW = "sternway.views.Report.active"
COSTS = Costs(F=0.002, I=0.002, W=0.001, comm=0.0003)


@pytest.fixture(scope="module")
def timeline() -> schedule.Timeline:
    return schedule.make("zb-h1", ranks=3, microbatches=6).simulate(COSTS)


@pytest.fixture
def page(timeline: schedule.Timeline, tmp_path: Path) -> Path:
    slower = schedule.make("zb-h1", ranks=3, microbatches=6).simulate(Costs(F=0.003, I=0.002, W=0.001))
    runs = [lane_run(timeline, "planned"), lane_run(slower, "measured")]
    sections = [
        viewer.Terms("What ran", [("ranks", "3")]),
        viewer.Bars("Time of a step", [viewer.Bar("one", 0.5), viewer.Bar("ours", 0.25, ours=True)], unit="s"),
        viewer.Verdict("The gradients are equal.", good=True),
        viewer.Curves("Loss", [viewer.Curve("loss", [(0, 2.0), (1, 1.5), (2, 1.25)])], x="step", y="loss"),
        viewer.Lanes("One step", runs, unit="s", limit=2.0),
        viewer.Sheet("All", ["name", "bubble"], [["a", (0.2, "20%")], ["b", (0.1, "10%")], ["c", None]], marked=[1]),
    ]
    return viewer.write(tmp_path / "step.html", title="A step", sections=sections)


def place(browser: Browser, label: str, run: int = 0) -> tuple[float, float]:
    """The middle of an action on the screen."""
    browser.run(f"{VIEW}.frames[{run}].scrollIntoView({{block: 'center'}})")
    browser.settle()
    found = browser.run(
        f"(() => {{ const v = {VIEW}, e = v.runs[{run}].events.find(e => e.label === '{label}');"
        f"const r = v.frames[{run}].querySelector(`rect[data-index='${{e.index}}']`).getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    return round(found[0]), round(found[1])


def view(browser: Browser) -> list[float]:
    return browser.run(f"{VIEW}.view")


def panel(browser: Browser) -> str:
    return browser.run("document.querySelector('.panel').innerText")


def quiet(browser: Browser) -> None:
    """Long after the page was scrolled: else the wheel goes on scrolling."""
    browser.run("scrolled = -1e6")


def test_every_action_is_there_with_the_share_of_the_bubble(
    browser: Browser, page: Path, timeline: schedule.Timeline
) -> None:
    browser.size(1400)
    browser.open(page)
    labels = browser.run("[...document.querySelectorAll('[data-run=\"0\"] rect.event')].length")
    assert labels == sum(map(len, timeline.events))
    heading = browser.run("document.querySelector('.run h3').textContent")
    assert heading == f"planned {1e3 * timeline.makespan:.4g} ms · bubble {timeline.bubble_rate:.1%}"
    assert browser.run("document.querySelectorAll('[data-run=\"0\"] rect.idle').length") == sum(
        after.start - before.end > 1e-9 for rank in timeline.events for before, after in pairwise(rank)
    )
    legend = browser.run("document.querySelector('.legend').textContent")
    for words in ("F forward", "I input gradient", "W weight gradient", "idle: the bubble", "3B0 is stage 3, B, micro"):
        assert words in legend
    ticks = browser.run("[...document.querySelectorAll('[data-run=\"0\"] .tick')].map(t => t.textContent)")
    assert ticks[:3] == ["0 ms", "5 ms", "10 ms"]
    strips = browser.run("[...document.querySelectorAll('[data-run=\"0\"] path.kept')].map(p => p.textContent)")
    assert strips == [f"rank {rank}: at most {peak:g}" for rank, peak in enumerate(timeline.peaks)]
    over = browser.run("document.querySelectorAll('[data-run=\"0\"] path.kept.over').length")
    assert over == sum(peak > 2 for peak in timeline.peaks)


def test_wheel_and_drag(browser: Browser, page: Path) -> None:
    browser.size(1400)
    browser.open(page)
    x, y = place(browser, "1F3")
    quiet(browser)
    whole = view(browser)
    at = browser.run(f"{VIEW}.time({x} - {VIEW}.frames[0].getBoundingClientRect().left)")
    for _ in range(5):
        quiet(browser)
        browser.wheel(x, y, -100)
    near = view(browser)
    assert near[1] - near[0] < 0.5 * (whole[1] - whole[0])
    still = browser.run(f"{VIEW}.time({x} - {VIEW}.frames[0].getBoundingClientRect().left)")
    assert still == pytest.approx(at)  # what is under the pointer stays there
    browser.drag((x, y), (x - 100, y))
    assert view(browser)[0] > near[0]
    assert view(browser)[1] - view(browser)[0] == pytest.approx(near[1] - near[0])
    turn = f"(() => {VIEW}.frames[0].dispatchEvent(new WheelEvent('wheel', {{deltaY: 100, cancelable: true}})))"
    taken = []
    for _ in range(12):
        quiet(browser)
        taken.append(not browser.run(f"{turn}()"))
    assert view(browser) == whole
    assert taken[0]
    assert not taken[-1]  # nothing is left to zoom out of: the page scrolls


def test_keys_of_perfetto(browser: Browser, page: Path) -> None:
    browser.size(1400)
    browser.open(page)
    whole = view(browser)
    for _ in range(4):
        browser.press("w")
    near = view(browser)
    assert near[1] - near[0] == pytest.approx(0.8**4 * (whole[1] - whole[0]))
    browser.press("d")
    assert view(browser)[0] > near[0]
    browser.press("a")
    assert view(browser) == pytest.approx(near)
    browser.press("s")
    assert view(browser)[1] - view(browser)[0] > near[1] - near[0]
    browser.press("0")
    assert view(browser) == whole


def test_a_click_shows_the_details_and_so_do_the_arrow_keys(
    browser: Browser, page: Path, timeline: schedule.Timeline
) -> None:
    browser.size(1400)
    browser.open(page)
    spot = place(browser, "1I2")
    browser.drag(spot, spot)
    event = next(event for event in timeline.events[1] if str(event.action) == "1I2")
    text = panel(browser)
    assert text.startswith("1I2")
    assert "input gradient of stage 1 for microbatch 2" in text
    assert f"{1e3 * event.start:.4g} ms to {1e3 * event.end:.4g} ms" in text
    assert "measured" in text  # the same action in the other run
    assert ("on it:" in text) == (event in timeline.critical_path)
    assert browser.run("document.querySelectorAll('rect.event.chosen').length") == 1
    browser.press("ArrowRight")
    following = timeline.events[1][event.step + 1]
    assert panel(browser).startswith(str(following.action))
    browser.press("ArrowDown")
    assert "rank 2" in panel(browser)
    browser.press("f")
    shown = view(browser)
    assert shown[1] - shown[0] < 0.01
    browser.press("Escape")
    assert panel(browser).startswith("Click an action")


def test_a_range_is_summed_up(browser: Browser, page: Path, timeline: schedule.Timeline) -> None:
    browser.size(1400)
    browser.open(page)
    x, y = place(browser, "0F1")
    browser.drag((x, y), (x + 400, y), shift=True)
    start, end = browser.run(f"{VIEW}.range")
    rows = browser.run(
        "[...document.querySelectorAll('table.sums')[0].querySelectorAll('tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )

    def inside(event: schedule.Event) -> float:
        return max(0.0, min(event.end, end) - max(event.start, start))

    busy = [sum(map(inside, rank)) for rank in timeline.events]
    assert [row[0] for row in rows] == ["rank 0", "rank 1", "rank 2", "all"]
    for row, worked in zip(rows, [*busy, sum(busy)], strict=True):
        assert row[1] == f"{1e3 * worked:.4g} ms"
    whole = 3 * (end - start)
    assert rows[-1][3] == f"{(whole - sum(busy)) / whole:.1%}"
    assert view(browser)[0] == 0  # the picture did not move
    browser.press("Escape")
    browser.run(f"{VIEW}.choose({VIEW}.runs[0], {VIEW}.runs[0].lanes[0][1])")
    browser.press("[")
    browser.run(f"{VIEW}.choose({VIEW}.runs[0], {VIEW}.runs[0].lanes[0][4])")
    browser.press("]")
    first, last = timeline.events[0][1], timeline.events[0][4]
    assert browser.run(f"{VIEW}.range") == [first.start, last.end]


def test_the_critical_path_can_be_shown_and_hidden(browser: Browser, page: Path, timeline: schedule.Timeline) -> None:
    browser.size(1400)
    browser.open(page)
    points = browser.run("document.querySelector('[data-run=\"0\"] polyline.path').getAttribute('points').split(' ')")
    assert len(points) == 2 * len(timeline.critical_path)
    browser.run("document.querySelector('button.critical').click()")
    browser.settle()
    assert browser.run("document.querySelectorAll('polyline.path').length") == 0


@pytest.mark.parametrize(("width", "theme"), [(800, "light"), (1600, "dark")])
def test_no_overflow_and_no_barriers(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.size(width)
    browser.open(page)
    browser.run(f"document.documentElement.dataset.theme = '{theme}'")
    spot = place(browser, "1I2")
    browser.drag(spot, spot)
    browser.run(f"{VIEW}.select(0.001, 0.01)")
    browser.settle()
    assert browser.overflow() <= 0
    assert browser.barriers() == []


def test_it_follows_the_window(browser: Browser, page: Path) -> None:
    browser.size(1600)
    browser.open(page)
    wide = browser.run(f"{VIEW}.wide")
    browser.size(800)
    narrow = browser.run(f"{VIEW}.wide")
    assert narrow < wide / 1.5
    box = browser.run("document.querySelector('svg.lanes').viewBox.baseVal.width")
    assert box == narrow


def test_it_prints_light_and_whole(browser: Browser, page: Path) -> None:
    browser.size(1200)
    browser.open(page)
    browser.run("document.documentElement.dataset.theme = 'dark'")
    browser.call("Emulation.setEmulatedMedia", media="print")
    style = browser.run(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.bar')).display,"
        "getComputedStyle(document.getElementById('report')).overflow]"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert style == ["rgb(255, 255, 255)", "none", "visible"]


def test_a_table_sorts_and_what_is_unknown_is_last(browser: Browser, page: Path) -> None:
    browser.open(page)
    first = "[...document.querySelectorAll('.sheet tbody tr')].map(r => r.cells[0].textContent)"
    assert browser.run(first) == ["a", "b", "c"]
    for expected in (["a", "b", "c"], ["b", "a", "c"]):
        browser.run("document.querySelectorAll('.sheet button.sort')[1].click()")
        assert browser.run(first) == expected
    assert browser.run("document.querySelectorAll('.sheet th')[1].getAttribute('aria-sort')") == "ascending"
    assert browser.run("document.querySelector('.sheet tr.marked').cells[0].textContent") == "b"


def test_many_actions_stay_few_boxes(browser: Browser, tmp_path: Path) -> None:
    large = schedule.make("1f1b", ranks=8, microbatches=2000).simulate()
    assert sum(map(len, large.events)) == 32_000
    browser.size(1400)
    browser.open(large.to_html(tmp_path / "large.html"))
    count: Any = browser.run("document.querySelectorAll('rect.event').length")
    assert 8 < count < 8 * 1400 / 2
    for _ in range(60):
        browser.press("w")
    browser.settle()
    assert browser.run("document.querySelectorAll('text.label').length") > 0


def test_what_links_carry_is_in_rows_of_its_own(browser: Browser, tmp_path: Path) -> None:
    costs = Costs(gather=1.5, reduce=1.0, offload=0.6)
    plain = schedule.make("zb-v", ranks=2, microbatches=4)
    moved = schedule.sharded(schedule.offloaded(plain, costs, memory_limit=1.5))
    timeline = moved.simulate(costs)
    carried = [
        event
        for events in timeline.events
        for event in events
        if isinstance(event.action, schedule.Upkeep) and event.end > event.start
    ]
    assert {event.action.op for event in carried} == {"UNSHARD", "REDUCE_GRAD", "OFFLOAD", "RELOAD"}
    browser.size(1400)
    browser.open(timeline.to_html(tmp_path / "links.html"))
    rows = browser.run(f"{VIEW}.runs[0].rows.map(r => [r.rank, r.link, r.events.map(e => e.label)])")
    found = sorted(label for _, link, labels in rows if link for label in labels)
    assert found == sorted(str(event.action) for event in carried)
    assert [link for rank, link, _ in rows if rank == 0] == ["", "link", "out", "back"]
    legend = browser.run("document.querySelector('.legend').textContent")
    for words in ("UNSHARD gathers parameters", "OFFLOAD moves away activations", "RELOAD brings back activations"):
        assert words in legend
    shown = browser.run("[...document.querySelectorAll('text.label')].map(t => t.textContent)")
    assert {"0U", "3U", "0R", "1"} <= set(shown)
    browser.run(f"{VIEW}.show(0, 3)")
    browser.settle()
    assert "0UNSHARD" in browser.run("[...document.querySelectorAll('text.label')].map(t => t.textContent)")
    browser.press("0")
    browser.settle()
    names = browser.run("[...document.querySelectorAll('text.link')].map(t => t.textContent)")
    assert names[:3] == ["link", "out", "back"]
    shares = browser.run("[...document.querySelectorAll('svg.lanes text.end title')].map(t => t.textContent)")
    for rank, share in enumerate(shares):  # of the computation alone
        spent = timeline.busy[rank] / (timeline.busy[rank] + _waited(timeline, rank))
        assert share.startswith(f"rank {rank} works {spent:.1%}")
    spot = place(browser, "0UNSHARD")
    browser.drag(spot, spot)
    text = panel(browser)
    assert text.startswith("0UNSHARD")
    assert "gathers parameters of stage 0" in text
    assert "beside its computation (link)" in text
    browser.press("ArrowUp")
    assert "beside its computation" not in panel(browser)
    assert browser.overflow() <= 0
    assert browser.barriers() == []


def _waited(timeline: schedule.Timeline, rank: int) -> float:
    """What a rank is idle from its first action to its last."""
    own = [event for event in timeline.events[rank] if not isinstance(event.action, schedule.Upkeep)]
    return sum(after.start - before.end for before, after in pairwise(own))
