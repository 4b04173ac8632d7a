"""Finding schedules: the search, a bound that no schedule can beat, and a comparison of all of them."""

from sternway.schedule.search._candidates import candidates
from sternway.schedule.search._compare import Comparison, Row, compare
from sternway.schedule.search._fuse import fuse
from sternway.schedule.search._lower_bound import lower_bound
from sternway.schedule.search._recompute import recomputed
from sternway.schedule.search._search import search

__all__ = ["Comparison", "Row", "candidates", "compare", "fuse", "lower_bound", "recomputed", "search"]
