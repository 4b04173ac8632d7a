"""What happens when a step fails, on this rank or on another: all ranks raise, and the pipeline is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sternway.errors import LostRankError, PipelineError, SternwayError
from sternway.pipeline.faults._report import Progress, write_report
from sternway.pipeline.transport._transport import Transport

_GLOO = "gloo/transport"  # in the text of an error of gloo: the file that raised it


class Guard:
    """Closes the pipeline after a failure, and leaves a report in the folder ``reports``."""

    def __init__(self, transport: Transport, rank: int, reports: Path) -> None:
        self.closed = self._failed = False
        self._transport, self._rank, self._reports = transport, rank, reports
        self._progress: Progress | None = None

    def follow(self, progress: Progress) -> None:
        """A step begins: reports and signs of life say how far it is."""
        if self._transport.watch is not None:
            self._progress = progress
            self._transport.watch.follow(position=progress.position)

    def enter(self, call: str) -> None:
        """A call begins that all ranks must make.

        Raises:
            PipelineError: if the pipeline is closed.
        """
        self.check_open(call)
        if self._transport.watch is not None:
            self._transport.watch.note_call(call)

    def check_open(self, what: str) -> None:
        """Raise if the pipeline is closed."""
        if self.closed:
            why = ", because it failed" if self._failed else ""
            raise PipelineError(f"this pipeline is closed{why}", got=what, fix="build a new one")

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """A block in which any error is raised on every rank and closes the pipeline."""
        try:
            with self.other_ranks():
                yield
        except LostRankError:
            raise
        except BaseException as error:
            lost = self._lost_peer(error)
            self._fail(error if lost is None else lost)
            if lost is not None:
                raise lost from error
            raise

    def _lost_peer(self, error: BaseException) -> LostRankError | None:
        """The error about a lost rank, if that made an action fail: its stage is sharded, and computes with others."""
        watch, cause = self._transport.watch, error.__cause__
        if watch is None or not isinstance(cause, RuntimeError):
            return None
        if watch.lost is None and _GLOO not in str(cause):
            return None
        if watch.lost_peer() is None:  # a timeout in a group of the user's, say: the error itself tells more
            return None
        found = self._transport.explain(cause)
        return found if isinstance(found, LostRankError) else None

    @contextmanager
    def other_ranks(self) -> Iterator[None]:
        """A block in which the loss of another rank closes the pipeline, but an error of this rank does not."""
        try:
            try:
                yield
            except (SternwayError, RecursionError, NotImplementedError):  # errors of code here, not of connections
                raise
            except RuntimeError as error:
                if self._transport.watch is None:
                    raise
                raise self._transport.explain(error) from error
        except LostRankError as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.closed = self._failed = True
        self._transport.fail(error)
        self.leave_report(error)

    def leave_report(self, error: BaseException) -> None:
        """Write a report, and add a note to ``error`` that says where it is."""
        watch, rank = self._transport.watch, self._rank
        if watch is not None:
            path = write_report(self._reports, rank, error, watch.lost, self._progress, watch.last_seen())
            if path is not None:
                error.add_note(f"What rank {rank} had done by then: {path}")

    def close(self) -> None:
        """Close the pipeline, which did not fail."""
        self.closed = True
        self._transport.close()
