"""Reading, writing and drawing schedules and timelines: CSV, JSON, Chrome trace, SVG, HTML and terminal."""

from sternway.schedule._again import show_recompute
from sternway.schedule.formats._chrome_trace import to_chrome_trace
from sternway.schedule.formats._csv import from_csv, to_csv
from sternway.schedule.formats._json import from_json, to_json
from sternway.schedule.formats._page import lane_run, write_comparison, write_timeline
from sternway.schedule.formats._svg import to_svg
from sternway.schedule.formats._terminal import describe_schedule, describe_size, describe_timeline, draw

__all__ = [
    "describe_schedule",
    "describe_size",
    "describe_timeline",
    "draw",
    "from_csv",
    "from_json",
    "lane_run",
    "show_recompute",
    "to_chrome_trace",
    "to_csv",
    "to_json",
    "to_svg",
    "write_comparison",
    "write_timeline",
]
