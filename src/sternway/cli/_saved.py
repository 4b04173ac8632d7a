"""``sternway saved``: run a step under a policy, and show what became of the tensors that it saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sternway._bytes import show_bytes
from sternway.cli._exit import MisuseError, usage
from sternway.cli._graph import _demo, _failed, function_of
from sternway.cli._progress import moving_bar
from sternway.cli._table import TableColumn, show_table, stdout

if TYPE_CHECKING:
    from sternway.saved import Offload, Report


def saved(
    target: Annotated[
        str | None, typer.Argument(help="path/to/file.py:function, which returns a loss, or a model and a sample.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="Where tensors go: cpu, disk, or none; cpu if there is a GPU, else disk.")
    ] = "",
    budget: Annotated[str, typer.Option(help="What may stay: 4GiB, a fraction such as 0.5, or auto.")] = "0",
    codec: Annotated[str, typer.Option(help="bf16, fp8, int8 or lossless.")] = "",
    where: Annotated[str | None, typer.Option(help="A pattern for the names of the modules to treat.")] = None,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are left alone.")] = "4KiB",
    directory: Annotated[Path | None, typer.Option(help="For disk; a temporary one unless given.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run; the last one is shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a step under a policy for saved tensors, and show what was moved, encoded, kept and skipped, by module."""
    import torch

    from sternway import saved as room

    function = _demo if target is None else function_of(target)
    to = to or ("cpu" if torch.cuda.is_available() else "disk")
    if to not in ("cpu", "disk", "none"):
        raise MisuseError("--to must be cpu, disk or none", got=repr(to), fix="pass one of the three")
    with ExitStack() as stack:
        policies: list[Any] = []
        with usage():
            if to != "none":
                policies.append(_offload(to, budget, where, min_bytes, directory, stack))
            if codec:
                policies.append(room.compress(codec, where=where, min_bytes=min_bytes))
        if not policies:
            policies.append(room.keep())
        with moving_bar(as_json, "the first step") as bar:
            for step in range(steps):
                report = _step(function, policies, target or "the demo")
                bar.update(step + 1, steps, "steps")
    if as_json:
        typer.echo(report.to_json())
    else:
        _show(report)
    if where is not None and not any(row.module in room.keep(where).where for row in report.modules):
        names = ", ".join(row.module for row in report.modules if row.module)
        raise MisuseError("--where must match a module that saves tensors", got=repr(where), fix=f"choose from {names}")


def _offload(
    to: str, budget: str, where: str | None, min_bytes: str, directory: Path | None, stack: ExitStack
) -> Offload:
    from sternway import saved as room

    allowed: float | str = budget
    if budget.replace(".", "", 1).isdigit() and "." in budget:
        allowed = float(budget)
    if to == "disk" and directory is None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return room.offload(to=to, budget=allowed, where=where, min_bytes=min_bytes, directory=directory)  # type: ignore[arg-type]  # it is checked there


def _step(function: Callable[[], Any], policies: list[Any], target: str) -> Report:
    import torch
    from torch import Tensor, nn

    with ExitStack() as stack:
        reports = [stack.enter_context(policy) for policy in policies]
        try:
            made = function()
        except Exception as error:
            raise _failed(f"{target} could not be called", error) from error
        first, *rest = made if isinstance(made, tuple) and made else (made,)
        if isinstance(first, nn.Module) and len(rest) == 1:  # a model and a sample
            sample = rest[0]
            outputs = first(*sample) if isinstance(sample, tuple | list) else first(sample)
            first = outputs.float().square().mean() if isinstance(outputs, Tensor) else outputs
    if not isinstance(first, Tensor) or not first.requires_grad:
        raise MisuseError(
            "the function must return a loss, or a model and a sample",
            got=f"a {type(first).__name__} from {target}",
            fix="return loss, or return model, sample",
        )
    torch.autograd.backward(first.sum())
    report: Report = reports[-1]
    return report


def _show(report: Report) -> None:
    header, *rows = report.cells()
    drops = {"packs": 5, "again": 4, "stalled": 6, "encoded": 3, "into": 2, "ratio": 1, "skipped": 7, "kept": 1}
    columns = [
        TableColumn(
            name, drops.get(name, 0), right=name not in ("module", "skipped"), wrap=name in ("module", "skipped")
        )
        for name in header
    ]
    show_table(columns, rows, styles=[""] * (len(rows) - 1) + ["bold"])
    text = f"Peak on the device of what the policies did not skip: {show_bytes(report.peak_bytes)}."
    stdout().print(text, highlight=False)
