"""Every exception that Sternway raises on purpose.

    SternwayError            catch this for all of them
    ├── SplitError           a backward that cannot be split as asked
    │   └── PendingError     a Pending used out of turn: run twice, or after a failed run
    ├── ScheduleError        a pipeline plan that is malformed, impossible or unknown
    ├── SavedError           a saved tensor that cannot be kept, moved or brought back as asked
    ├── HookError            a hook on a place where no gradient can arrive, or a handle misused
    ├── StateError           a state that is read too early, used in a wrong place, or gone
    │   └── EmptyStateError  a value that is not there to be read: not set, or not yet
    ├── GraphError           a question that a captured graph cannot answer, or a graph that cannot be captured
    │   └── BackwardError    a backward that failed, explained: what broke it, where, and the usual fix
    ├── ViewerError          a report that cannot be drawn from what was passed
    ├── PipelineError        a pipeline that was put together wrongly, or that failed on some rank
    │   ├── LostRankError    another rank died, stopped or failed; says which, and what it was doing
    │   ├── NonfiniteError   gradients that are infinite or not a number; says which module they come from
    │   └── CheckpointError  a checkpoint that cannot be written, is damaged, or does not fit
    ├── AtlasError           a source tree that cannot be documented as asked
    └── UnsupportedTorch     this release of torch is not one that we know how to work with

Each message says three things: the rule, what was got instead, and how to mend it.
"""

import reprlib


class SternwayError(Exception):
    """The root of the tree; also a place to read the convention from.

    Example:
        >>> raise SternwayError("a rule", got="what broke it", fix="how to mend it")
        Traceback (most recent call last):
        ...
        sternway.errors.SternwayError: a rule; got what broke it. Fix: how to mend it
    """

    def __init__(self, rule: str, *, got: str = "", fix: str = "") -> None:
        self.rule, self.got, self.fix = rule, got, fix
        message = rule
        if got:
            message += f"; got {got}"
        if fix:
            message += f". Fix: {fix}"
        super().__init__(message)

    @classmethod
    def unless(cls, fits: bool, rule: str, value: object, fix: str) -> None:
        """Raise an error about ``value`` unless it fits.

        Example:
            >>> SternwayError.unless(isinstance("three", int), "a count must be a number", "three", "pass 3")
            Traceback (most recent call last):
            ...
            sternway.errors.SternwayError: a count must be a number; got str 'three'. Fix: pass 3
        """
        if not fits:
            raise cls(rule, got=f"{type(value).__name__} {reprlib.repr(value)}", fix=fix)


class SplitError(SternwayError, RuntimeError):
    """A backward that cannot be split as asked; a ``RuntimeError``, as torch's own are."""


class PendingError(SplitError):
    """A ``Pending`` used out of turn."""


class ScheduleError(SternwayError):
    """A pipeline plan that is malformed, impossible or unknown."""


class SavedError(SternwayError, RuntimeError):
    """A saved tensor that cannot be kept, moved or brought back as asked; a ``RuntimeError``, as torch's own are."""


class HookError(SternwayError):
    """A hook on a place where no gradient can arrive, or a handle misused."""


class StateError(SternwayError):
    """A state that is read too early, used in a wrong place, or gone."""


class EmptyStateError(StateError, AttributeError):
    """A value that is not there to be read; an ``AttributeError``, so that ``hasattr`` and ``getattr`` work."""


class GraphError(SternwayError):
    """A question that a captured graph cannot answer, or a graph that cannot be captured."""


class BackwardError(GraphError, RuntimeError):
    """A backward that failed, explained; a ``RuntimeError`` as torch's own, so that handlers for that still work."""


class ViewerError(SternwayError):
    """A report that cannot be drawn from what was passed."""


class PipelineError(SternwayError):
    """A pipeline that was put together wrongly, or that failed on some rank."""


class AtlasError(SternwayError):
    """A source tree that cannot be documented as asked."""


class LostRankError(PipelineError):
    """Another rank died, stopped or failed."""


class NonfiniteError(PipelineError):
    """Gradients that are infinite or not a number."""


class CheckpointError(PipelineError):
    """A checkpoint that cannot be written, is damaged, or does not fit."""


class UnsupportedTorch(SternwayError):  # noqa: N818 - reads as what it is
    """This release of torch is not one that we know how to work with."""
