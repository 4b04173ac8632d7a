"""``sternway graph``: the autograd graph behind a function, as a page, as JSON or in the terminal."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sternway.cli._exit import MisuseError
from sternway.cli._progress import moving_bar
from sternway.errors import GraphError

if TYPE_CHECKING:
    from torch import Tensor

    from sternway.demo import GPT
    from sternway.graph import Graph

DEMO_REPORT = Path("sternway-graph.html")


def graph(
    target: Annotated[
        str | None, typer.Argument(help="path/to/file.py:function, which returns a loss, or a model and a sample.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the graph here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the graph as JSON.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Print the modules as a tree.")] = False,
    depth: Annotated[int | None, typer.Option(min=0, help="Levels of modules in the tree.")] = None,
) -> None:
    """Show an autograd graph: nodes, owners, and the bytes kept for the backward. Without TARGET, a small GPT's."""
    function = _demo if target is None else function_of(target)
    if not (html or as_json or text):
        text, html = True, html or DEMO_REPORT
        depth = 2 if depth is None else depth
    with moving_bar(as_json, "running the forward"):
        captured = _capture(function, target or "the demo")
    if html is not None:
        with moving_bar(as_json, f"writing {len(captured.nodes):,} nodes"):
            captured.to_html(html, title=f"Autograd graph of {target or 'a small GPT'}")
        Console(stderr=True).print(f"Wrote {html}: open it in a browser.", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(captured.to_json())
    elif text:
        typer.echo(captured.to_text(depth))


def _demo() -> tuple[GPT, Tensor]:
    import torch

    from sternway.demo import GPT

    torch.manual_seed(0)
    return GPT(vocabulary=256, dim=128, heads=4, layers=4, length=64), torch.randint(0, 256, (2, 64))


def function_of(target: str) -> Callable[[], Any]:
    """The function that ``path/to/file.py:function`` means."""
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        raise MisuseError(
            "TARGET must be path/to/file.py:function", got=repr(target), fix="name a file and a function in it"
        )
    file = Path(path)
    if not file.is_file():
        raise MisuseError("TARGET must name a Python file", got=f"{path!r}, which is not one", fix="check the path")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise MisuseError("TARGET must name a Python file", got=repr(path), fix="give it a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        sys.modules[file.stem] = module  # so that dataclasses and pickles defined there find their module
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(f"{path} cannot be imported", error) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise MisuseError(
            f"TARGET must name a function in {path}",
            got=repr(name),
            fix=f"pass one of {', '.join(known)}" if known else "define one",
        )
    return function  # type: ignore[no-any-return]  # callable: just looked


def _failed(rule: str, error: Exception) -> GraphError:
    """An error in the user's code, with its line, because the command line shows no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return GraphError(rule, got=f"{type(error).__name__}: {error}{where}", fix="correct the code there")


def _capture(function: Callable[[], Any], target: str) -> Graph:
    from torch import Tensor, nn

    from sternway.graph import capture, record

    try:
        with record():
            made = function()
    except Exception as error:
        raise _failed(f"{target} failed", error) from error
    first, *rest = made if isinstance(made, tuple) and made else (made,)
    if isinstance(first, nn.Module) and len(rest) == 1:  # a model and a sample
        model, (sample,) = first, rest
        with record(model):
            outputs = model(*sample) if isinstance(sample, tuple | list) else model(sample)
        return capture(outputs, model)
    if rest and isinstance(rest[0], nn.Module):  # a loss and its model
        return capture(first, rest[0])
    if isinstance(made, Tensor | list | dict | tuple):
        return capture(made)
    raise MisuseError(
        "the function must return a loss, or a model and a sample",
        got=f"a {type(made).__name__} from {target}",
        fix="return loss, or return loss, model, or return model, sample",
    )
