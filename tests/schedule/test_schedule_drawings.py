"""What a person looks at: the terminal drawing, the SVG and the trace."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", schedule.names())
def test_the_drawing_has_every_action_and_keeps_its_width(name):
    s = schedule.make(name, ranks=3, microbatches=6)
    title, *lines = s.draw().split("\n")
    assert title.startswith(f"{name}: 3 ranks, 6 microbatches; makespan ")
    assert len({len(line) for line in lines}) == 1
    for steps, line in zip(s.actions, lines, strict=True):
        labels = line.split("|")[1].replace("-", " ").split()
        assert len([label for label in labels if label != "."]) == len(steps)
    for width in (20, 60, 200):
        assert all(len(line) <= width for line in s.draw(width=width).split("\n")[1:])


def test_the_drawing_by_hand():
    s = schedule.make("1f1b", ranks=2, microbatches=2)
    assert s.draw(Costs(W=0.0)) == (
        "1f1b: 2 ranks, 2 microbatches; makespan 6, bubble rate 33.3%, peak memory 2\n"
        "rank 0 |F0 F1 .  B0 .  B1 |\n"
        "rank 1 |.  F0 B0 F1 B1 .  |"
    )


def test_colours_are_optional_and_change_no_text():
    s = schedule.make("zb-v", ranks=2, microbatches=3)
    colored = s.draw(color=True)
    assert "\x1b[" in colored
    assert "\x1b[" not in s.draw()
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == s.draw()


def test_a_drawing_needs_some_room():
    with pytest.raises(ScheduleError, match="width must be at least 20 characters; got 10"):
        schedule.make("1f1b", ranks=2, microbatches=2).draw(width=10)


@pytest.mark.parametrize("name", schedule.names())
def test_the_svg_has_a_box_for_every_action(name):
    s = schedule.make(name, ranks=3, microbatches=6)
    t = s.simulate(Costs(F=1.1, I=0.9, W=0.7, comm=0.05, memory_after_I=0.4))
    root = ElementTree.fromstring(t.to_svg())
    tips = [g.find(f"{SVG}title").text for g in root.iter(f"{SVG}g")]
    assert sorted(tip.split(":")[0] for tip in tips) == sorted(str(a) for steps in s.actions for a in steps)
    numbers = [text.text for g in root.iter(f"{SVG}g") for text in g.iter(f"{SVG}text")]
    assert len(numbers) == len(tips)  # all wide enough for their microbatch's number
    words = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    for word in ("rank 0", "rank 2", "time", "memory of each rank", f"{name}: 3 ranks, 6 microbatches"):
        assert word in words


def test_boxes_stay_on_the_page_and_apart():
    t = schedule.make("zb-h1", ranks=4, microbatches=6).simulate(Costs(comm=0.3))
    root = ElementTree.fromstring(t.to_svg())
    width, height = float(root.get("width")), float(root.get("height"))
    rows = {}
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + w <= width
        assert y + h <= height
        rows.setdefault(y, []).append((x, x + w))
    assert len(rows) == 4
    for boxes in rows.values():
        boxes.sort()
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(boxes))


def test_names_are_escaped():
    s = schedule.Schedule("<b>&", 1, ((0,),), schedule.make("1f1b", ranks=1, microbatches=1).actions)
    assert "&lt;b&gt;&amp;: 1 ranks" in s.simulate().to_svg()


def test_the_trace_has_every_event_and_the_memory():
    s = schedule.make("dualpipe-v", ranks=2, microbatches=4)
    t = s.simulate(Costs(comm=0.25))
    events = json.loads(t.to_chrome_trace())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices} == {
        (str(e.action), e.rank, e.start * 1000, (e.end - e.start) * 1000) for rank in t.events for e in rank
    }
    assert sum(e["args"]["critical_path"] for e in slices) == len(t.critical_path)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1"}
    assert max(e["args"]["microbatches"] for e in events if e["ph"] == "C") == t.peak_memory


def test_what_a_schedule_prints():
    s = schedule.make("zb-v", ranks=2, microbatches=1)
    assert (
        str(s)
        == "zb-v: 2 ranks, 1 microbatch, 4 stages\nrank 0: 0F0 3F0 3I0 3W0 0I0 0W0\nrank 1: 1F0 2F0 2I0 2W0 1I0 1W0"
    )
    assert repr(s) == "<Schedule zb-v: 2 ranks, 1 microbatch, 4 stages>"


def test_a_large_schedule_prints_on_one_screen():
    s = schedule.make("1f1b", ranks=20, microbatches=100)
    lines = str(s).split("\n")
    assert len(lines) == 18
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("rank 0: 0F0 0F1 ")
    assert lines[1].endswith(" …")
    assert lines[-1] == "… and 4 more ranks"
    assert len(str(s.simulate()).split("\n")) == 20


def test_what_a_timeline_prints():
    t = schedule.make("1f1b", ranks=2, microbatches=2).simulate(Costs(F=1, I=2, W=3, comm=0.5))
    assert str(t) == (
        "1f1b: 2 ranks, 2 microbatches, 2 stages\n"
        "makespan 19, longest span of a rank 19, bubble rate 36.8%, peak memory 2\n"
        "rank 0: busy 12, idle 7, peak memory 2\n"
        "rank 1: busy 12, idle 0, peak memory 1\n"
        "critical path: B of stage 1 53%, B of stage 0 26%, F of stage 1 11%"
    )
    assert repr(t) == "<Timeline of 1f1b: makespan 19, bubble rate 36.8%, peak memory 2>"
    measured = schedule.Timeline.measured(t.schedule, [[(e.start, e.end) for e in rank] for rank in t.events])
    assert str(measured) == "\n".join(str(t).split("\n")[:-1])  # the critical path of a run is not known


def test_notebooks_show_drawings():
    s = schedule.make("zb-v", ranks=2, microbatches=3)
    assert s.simulate()._repr_html_() == s._repr_html_() == s.simulate().to_svg()
    stuck = schedule.from_csv("0B0,0F0\n1F0,1B0\n")
    assert stuck._repr_html_() is None
    assert str(stuck).endswith("rank 0: 0B0 0F0\nrank 1: 1F0 1B0")
