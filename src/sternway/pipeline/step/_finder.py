"""Searches for plans that the first rank does for all, while steps go on."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice

from sternway.pipeline.step._beside import beside
from sternway.schedule import Schedule

Search = Callable[[], list[Schedule]]
"""Returns plans, the best first."""

Hear = Callable[[bytes], Callable[[], bytes]]
"""Takes what this rank would say if it is the first, and returns a function that waits for what the first has said."""


class Finder:
    """What one rank knows of the searches for its pipeline's plans.

    All ranks call the same methods between the same steps.

    Args:
        is_first: whether this rank is the one that searches.
        hear: how ranks hear of the first one.
        begin: begins a search. By default it runs in a process of its own.
    """

    def __init__(
        self,
        is_first: bool = True,
        hear: Hear = lambda said: lambda: said,
        begin: Callable[[Search], Future[list[Schedule]]] = beside,
    ) -> None:
        self._is_first, self._hear, self._begin = is_first, hear, begin
        self._search: Future[list[Schedule]] | None = None

    def begin(self, search: Search) -> None:
        """Begin to search."""
        self._search = self._begin(search) if self._is_first else None

    def ask(self, fits: Callable[[Schedule], bool], count: int) -> Callable[[], list[Schedule] | None]:
        """Ask for the best plans that fit, at most ``count``, if the search is done.

        Returns:
            A function that waits for the answer. It is None while the search goes on, and empty if it has failed.
        """
        said = b""
        if self._search is not None and self._search.done():
            said = pickle.dumps(_best(self._search, fits, count))
        heard = self._hear(said)

        def answer() -> list[Schedule] | None:
            found: list[Schedule] | None = pickle.loads(text) if (text := heard()) else None
            return found

        return answer

    def stop(self) -> None:
        """End a search that nobody wants any more."""
        if self._search is not None:
            self._search.cancel()

    def __del__(self) -> None:
        self.stop()  # a pipeline may be dropped without close()


def _best(search: Future[list[Schedule]], fits: Callable[[Schedule], bool], count: int) -> list[Schedule]:
    try:
        return list(islice(filter(fits, search.result()), count))
    except Exception as error:
        warnings.warn(f"the plan stays: the search for a better one failed with {error!r}", RuntimeWarning, 2)
        return []
