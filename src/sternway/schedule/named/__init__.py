"""The named schedules, one file each, and ``make``, which builds one by its name."""

from sternway.schedule.named._make import make, names

__all__ = ["make", "names"]
