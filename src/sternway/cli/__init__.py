"""The ``sternway`` command. One file for each subcommand; none imports torch before it runs."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from sternway import __version__
from sternway.cli._exit import ending

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
        command = typer.main.get_command(one)
        (option,) = typer.main.get_command(_with_debug).params
        option.expose_value = False  # its callback has noted it
        command.params.append(option)
        return command

    def invoke(self, ctx: Any) -> Any:
        with ending(ctx.meta):
            return super().invoke(ctx)


def _note_debug(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta["debug"] = True


_with_debug = typer.Typer(add_completion=False)  # makes the option that every command gets


@_with_debug.command()
def _debug(
    debug: Annotated[
        bool, typer.Option("--debug", callback=_note_debug, help="Show the traceback of an error.")
    ] = False,
) -> None:
    pass


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
    """Run the command line."""
    app()
