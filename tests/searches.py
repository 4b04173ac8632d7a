"""Searches of "auto" that are done when they have begun: how long one takes must not decide what a test sees."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from sternway.pipeline.build import _agree
from sternway.pipeline.step._tuner import Search, Tuner
from sternway.schedule import Schedule


def at_once(search: Search) -> Future[list[Schedule]]:
    """The result of a search, here and now."""
    found: Future[list[Schedule]] = Future()
    found.set_result(search())
    return found


@contextmanager
def searches_at_once() -> Iterator[None]:
    """A block in which pipelines are built that search so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agree, "Tuner", functools.partial(Tuner, begin=at_once))
        yield
