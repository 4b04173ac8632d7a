"""Pipeline plans as frozen data."""

from sternway.schedule._action import Action, Op, Overlap
from sternway.schedule._costs import Costs
from sternway.schedule._schedule import Schedule

__all__ = ["Action", "Costs", "Op", "Overlap", "Schedule"]
