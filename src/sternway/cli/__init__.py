"""The ``sternway`` command. One file for each subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

from sternway import __version__
from sternway.cli._demo import demo
from sternway.cli._doctor import doctor
from sternway.cli._graph import graph
from sternway.cli._plan import plan
from sternway.cli._saved import saved
from sternway.cli._split import split

__all__ = ["app", "main"]

app = typer.Typer(
    name="sternway",
    help="Command of PyTorch's backward pass.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sternway {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(demo)
app.command()(doctor)
app.command()(graph)
app.command()(plan)
app.command()(saved)
app.command()(split)


def main() -> None:
    """Run the command line; an error that we raised on purpose is one line, not a traceback."""
    from rich.console import Console

    from sternway.errors import SternwayError

    try:
        app()
    except SternwayError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(2) from None
