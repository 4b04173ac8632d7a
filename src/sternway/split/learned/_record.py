"""What is known of Functions: one record for each, for the process.

A verdict holds for calls that look alike (``BackwardCall.form``). A Function that was split in one form is tried again
in the next, up to a number; one that was found out not to do as it should stays whole in all of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from sternway._torch.functions import has_plain_call, is_users
from sternway.split.learned._call import Flags
from sternway.split.learned._try import PartTimes, TrialOutcome

MOST_FORMS = 16
MOST_NAMESAKES = 16
"""How many Functions of one name are tried, unless named: a class that each forward makes anew is tried each time."""


@dataclass(eq=False, slots=True)
class LearnedKind:
    """What is known of a Function that is called for these inputs, some of which may wait."""

    needs: Flags
    waiting: frozenset[int]
    verdict: Literal["split", "whole", "untried"] = "untried"
    why: str = "not tried: see split.learn"
    forms: dict[Hashable, bool] = field(default_factory=dict)  # that it was tried in: whether it was equal in every bit
    trials: int = 0
    asked: int = 0  # how often a trial might have been made since one has told something
    calls: int = 0
    seconds: PartTimes | None = None
    held: int = 0

    def splits(self, form: Hashable, exact: bool) -> bool:
        """Whether calls that look like this one are split."""
        return self.verdict == "split" and (self.forms.get(form) or (form in self.forms and not exact))

    def may_try(self, form: Hashable) -> bool:
        """Whether to try a call that looks like this one: more and more seldom, while trials tell nothing."""
        if self.verdict == "whole" or form in self.forms or len(self.forms) >= MOST_FORMS:
            return False
        self.asked += 1
        return not self.asked & (self.asked - 1)

    def note(self, form: Hashable, outcome: TrialOutcome) -> None:
        """Keep what a trial has found."""
        self.trials += 1
        if outcome.splits:
            self.verdict, self.why, self.asked = "split", "", 0
            self.forms[form] = outcome.exact
            self.held = max(self.held, outcome.held)
            self.seconds = outcome.seconds or self.seconds
        elif outcome.splits is False:
            self.stay_whole(outcome.why)
            self.seconds = outcome.seconds or self.seconds
        else:
            self.why = outcome.why

    def stay_whole(self, why: str) -> None:
        self.verdict, self.why = "whole", why
        self.forms.clear()


class FunctionRecord:
    """One Function.

    Args:
        exact: whether it must be equal in every bit to be split; None if it is not to be tried.
        is_users: whether it is not torch's own.
        is_plain: whether its backward can be called with a ``ctx`` of ours.
    """

    __slots__ = ("_is_plain", "_is_users", "exact", "kinds", "was_met")

    def __init__(self, exact: bool | None, is_users: bool, is_plain: bool) -> None:
        self.exact, self._is_users, self._is_plain = exact, is_users, is_plain
        self.was_met = False
        self.kinds: dict[tuple[Flags, frozenset[int]], LearnedKind] = {}

    def is_wanted(self, needs: Flags) -> bool:
        """Whether a call is worth a look: it may be tried or split, or the Function is a user's and new."""
        if self.exact is None:
            return self._is_users and not self.was_met
        found = [kind.verdict for kind in self.kinds.values() if kind.needs == needs]
        return not found or found.count("whole") < len(found)

    def kind(self, needs: Flags, waiting: frozenset[int]) -> LearnedKind:
        """What is known of calls for these inputs."""
        kind = self.kinds.get((needs, waiting))
        if kind is None:
            kind = LearnedKind(needs, waiting)
            if not self._is_plain:
                kind.stay_whole("its backward takes what it needs out of ctx, once")
            kind = self.kinds.setdefault((needs, waiting), kind)
        return kind


CHOSEN: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()
"""By class, what ``learn`` and ``unlearn`` said: whether to be equal in every bit; None: not to be tried."""
RECORDS: WeakKeyDictionary[Any, FunctionRecord] = WeakKeyDictionary()
NAMESAKES: Counter[str] = Counter()
LOCK = threading.Lock()


def record_of(function: type) -> FunctionRecord:
    """The record of a Function."""
    record = RECORDS.get(function)
    if record is None:
        with LOCK:
            users = is_users(function)
            base = next((base for base in function.__mro__ if base in CHOSEN), None)
            exact = CHOSEN[base] if base is function or (base is not None and users) else None
            if exact is not None and base is not function:
                name = f"{function.__module__}.{function.__qualname__}"
                NAMESAKES[name] += 1
                exact = exact if NAMESAKES[name] <= MOST_NAMESAKES else None
            record = RECORDS.setdefault(function, FunctionRecord(exact, users, has_plain_call(function)))
    return record
