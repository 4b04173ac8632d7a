"""``sternway doctor``: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from sternway import __version__

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``needed`` means that the library does not work without it."""

    what: str
    found: str  # empty where it is missing
    fix: str = ""
    needed: bool = False


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Report what this machine has, what is missing and how to get it; exit 1 if something needed is missing."""
    findings = list(examine())
    well = all(finding.found for finding in findings if finding.needed)
    if as_json:
        typer.echo(json.dumps({"well": well, "findings": [asdict(finding) for finding in findings]}))
    else:
        table = Table(title=f"sternway {__version__}")
        for heading in ("", "what", "found", "how to get it"):
            table.add_column(heading)
        for finding in findings:
            mark = "[green]✓[/green]" if finding.found else "[red]✗[/red]" if finding.needed else "[yellow]–[/yellow]"
            table.add_row(mark, finding.what, finding.found or "missing", "" if finding.found else finding.fix)
        Console().print(table)
    if not well:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything that some part of the library uses."""
    yield Finding("Python", platform.python_version(), needed=True)
    recent = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
    yield Finding(
        "PyTorch", _build() if recent else "", f"this is {torch.__version__}; pip install 'torch>=2.11'", needed=True
    )
    yield Finding("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch", needed=True)
    yield Finding("CUDA devices", _cuda(), "optional: a CUDA build of torch and an NVIDIA driver")
    yield Finding(
        "distributed backends",
        ", ".join(_backends()),
        "a torch built with torch.distributed, to train across processes",
    )
    yield Finding(
        "C++ compiler",
        _first_on_path(os.environ.get("CXX", ""), "c++", "g++", "clang++"),
        "for torch.compile with Inductor on the CPU: apt install g++, or set CXX",
    )
    yield Finding("browser", _first_on_path(*BROWSERS), "to test HTML reports: apt install chromium")


def _build() -> str:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}"


def _cuda() -> str:
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _backends() -> list[str]:
    if not torch.distributed.is_available():
        return []
    present = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return [name for name, there in present.items() if there]


def _first_on_path(*names: str) -> str:
    return next((path for name in names if name and (path := shutil.which(name))), "")
