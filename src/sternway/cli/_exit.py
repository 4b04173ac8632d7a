"""How every command ends: 0 if it did what was asked, 1 if that failed, 2 if it was called wrongly, 130 if interrupted.

An error of ours is one line on stderr; with ``--debug`` the traceback comes before it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from sternway.errors import SternwayError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class MisuseError(SternwayError):
    """A command was called with arguments that do not fit."""


@contextmanager
def usage() -> Iterator[None]:
    """A block that looks at arguments: an error in it is about how the command was called."""
    try:
        yield
    except SternwayError as error:
        raise MisuseError(error.rule, got=error.got, fix=error.fix) from error


def status_of(error: SternwayError) -> int:
    """The exit status that stands for an error."""
    return MISUSED if isinstance(error, MisuseError) else FAILED


def show(error: SternwayError) -> None:
    """Print an error in one line."""
    typer.secho("error: ", fg="red", nl=False, err=True)
    typer.echo(str(error), err=True)


@contextmanager
def ending(debug: dict[str, bool]) -> Iterator[None]:
    """A block that runs a command. ``debug`` has an entry if tracebacks are wanted."""
    try:
        yield
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except SternwayError as error:
        if debug:
            traceback.print_exception(error)
        show(error)
        raise typer.Exit(status_of(error)) from None
