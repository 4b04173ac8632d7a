"""Pipeline plans as frozen data: make them by name, check, simulate, search, read, write and draw them.

    from sternway import schedule

    s = schedule.make("zb-v", ranks=4, microbatches=8).check()
    t = s.simulate(schedule.Costs(F=1.0, I=1.0, W=0.6, comm=0.05))
    print(t)
    print(t.draw())

The core is in this folder; ``named/`` has one file for each named schedule, ``search/`` finds new ones, and
``formats/`` reads, writes and draws them. Standard library only. docs/schedules.md describes each schedule, and how
costs and memory are counted.
"""

from sternway.schedule._action import Action, Op, Overlap, Step, Upkeep, UpkeepOp
from sternway.schedule._again import Share
from sternway.schedule._check import check
from sternway.schedule._costs import Costs
from sternway.schedule._measured import measured_costs
from sternway.schedule._offload import offloaded
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate
from sternway.schedule._stage_costs import StageCosts
from sternway.schedule._timeline import Bottleneck, Event, Timeline
from sternway.schedule._upkeep import sharded
from sternway.schedule.formats import from_csv, from_json
from sternway.schedule.named import make, names
from sternway.schedule.search import Comparison, Row, candidates, compare, fuse, lower_bound, recomputed, search

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
    "Share",
    "StageCosts",
    "Step",
    "Timeline",
    "Upkeep",
    "UpkeepOp",
    "candidates",
    "check",
    "compare",
    "from_csv",
    "from_json",
    "fuse",
    "lower_bound",
    "make",
    "measured_costs",
    "names",
    "offloaded",
    "recomputed",
    "search",
    "sharded",
    "simulate",
]
