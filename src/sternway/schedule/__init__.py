"""Pipeline plans as frozen data: make them by name, check, time, search, read, write and draw them.

    from sternway import schedule

    s = schedule.make("zb-v", ranks=4, microbatches=8).check()
    t = s.simulate(schedule.Costs(F=1.0, I=1.0, W=0.6, comm=0.05))
    print(t.bubble_rate, t.peak_memory, t.bottlenecks[0])
    print(t.draw())

Standard library only. docs/schedules.md says what each schedule is for, and how costs and memory are counted.
"""

from sternway.schedule._action import Action, Op, Overlap
from sternway.schedule._check import check
from sternway.schedule._compare import Comparison, Row, compare
from sternway.schedule._costs import Costs, StageCosts
from sternway.schedule._csv import from_csv
from sternway.schedule._fuse import fuse
from sternway.schedule._json import from_json
from sternway.schedule._lower_bound import lower_bound
from sternway.schedule._make import make, names
from sternway.schedule._schedule import Schedule
from sternway.schedule._search import search
from sternway.schedule._simulate import simulate
from sternway.schedule._timeline import Bottleneck, Event, Timeline

__all__ = [
    "Action",
    "Bottleneck",
    "Comparison",
    "Costs",
    "Event",
    "Op",
    "Overlap",
    "Row",
    "Schedule",
    "StageCosts",
    "Timeline",
    "check",
    "compare",
    "from_csv",
    "from_json",
    "fuse",
    "lower_bound",
    "make",
    "names",
    "search",
    "simulate",
]
