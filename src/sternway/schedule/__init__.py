"""Pipeline plans as frozen data."""

from sternway.schedule._action import Action, Op, Overlap
from sternway.schedule._costs import Costs
from sternway.schedule._make import make, names
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate
from sternway.schedule._timeline import Bottleneck, Event, Timeline

__all__ = [
    "Action",
    "Bottleneck",
    "Costs",
    "Event",
    "Op",
    "Overlap",
    "Schedule",
    "Timeline",
    "make",
    "names",
    "simulate",
]
