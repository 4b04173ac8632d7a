"""The ``sternway`` command. One file for each subcommand; none imports torch before it runs."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from sternway import __version__
from sternway.errors import SternwayError

__all__ = ["app", "main"]

COMMANDS = ("atlas", "demo", "doctor", "fit", "graph", "plan", "saved", "split")  # each is a function of _name.py


class _Commands(typer.core.TyperGroup):
    """Subcommands that are imported when they are named, or when ``--help`` lists them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        one.command(cmd_name)(getattr(importlib.import_module(f"sternway.cli._{cmd_name}"), cmd_name))
        return typer.main.get_command(one)


app = typer.Typer(
    name="sternway",
    cls=_Commands,
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


def main() -> None:
    """Run the command line; a ``SternwayError`` is printed in one line, without a traceback."""
    try:
        app()
    except SternwayError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None
