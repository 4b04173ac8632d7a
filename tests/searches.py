"""Searches of "auto" that are done when they have begun: how long one takes must not decide what a test sees."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from sternway.pipeline.build import _agree
from sternway.pipeline.step._finder import Finder, Search
from sternway.schedule import Schedule


def at_once(search: Search) -> Future[list[Schedule]]:
    """The result of a search, here and now."""
    found: Future[list[Schedule]] = Future()
    found.set_result(search())
    return found


def nothing_at_all(directory: str) -> None:
    """A call that never ends; a file names its process."""
    (Path(directory) / str(os.getpid())).touch()
    threading.Event().wait()


@contextmanager
def searches_at_once() -> Iterator[list[Search]]:
    """A block in which pipelines are built that search so; it gets a list of what they search for in this process."""
    begun: list[Search] = []

    def begin(search: Search) -> Future[list[Schedule]]:
        begun.append(search)
        return at_once(search)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agree, "Finder", functools.partial(Finder, begin=begin))
        yield begun
