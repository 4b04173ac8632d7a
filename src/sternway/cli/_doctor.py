"""``sternway doctor``: what this machine has, what is missing, and whether this torch does what we need."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sternway import __version__

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OLDEST, NEWEST = (2, 11), (2, 13)  # minor releases of torch that the tests have run on


@dataclass(frozen=True, slots=True)
class Finding:
    """Something on this machine. Without what is ``needed``, the library does not work."""

    what: str
    found: str  # empty where it is missing
    fix: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A private name of torch, the features that use it, and what went wrong, if anything."""

    name: str
    features: tuple[str, ...]
    expected: str
    fault: str | None


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Check this machine and this torch: what is there, what is missing, how to get it. Exit 1 if it is not enough."""
    findings, probes, warnings = list(examine()), probe_torch(), list(warn())
    well = all(finding.found for finding in findings if finding.needed) and not any(probe.fault for probe in probes)
    if as_json:
        record = {"well": well, "warnings": warnings}
        record["findings"] = [asdict(finding) for finding in findings]
        record["probes"] = [asdict(probe) for probe in probes]
        typer.echo(json.dumps(record))
    else:
        _show(findings, probes, warnings)
    if not well:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything that some part of the library uses."""
    import torch

    yield Finding("Python", platform.python_version(), needed=True)
    yield Finding(
        "PyTorch",
        _build() if _minor() >= OLDEST else "",
        f"this is {torch.__version__}; pip install 'torch>={_dotted(OLDEST)}'",
        needed=True,
    )
    yield Finding("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch", needed=True)
    yield Finding("CUDA devices", _cuda(), "optional: a CUDA build of torch and an NVIDIA driver")
    yield Finding(
        "distributed backends",
        ", ".join(_backends()),
        "a torch built with torch.distributed, to train across processes",
    )
    yield Finding("ranks of a pipeline", _ranks(), "a torch built with torch.distributed and gloo")
    yield Finding(
        "C++ compiler",
        _first_on_path(os.environ.get("CXX", ""), "c++", "g++", "clang++"),
        "for torch.compile with Inductor on the CPU: apt install g++, or set CXX",
    )
    yield Finding("browser", _first_on_path(*BROWSERS), "to test HTML reports: apt install chromium")


def probe_torch() -> list[ProbeResult]:
    """The result of every probe."""
    from sternway._torch import all_probes

    return [ProbeResult(probe.name, probe.features, probe.expected, probe.fault()) for probe in all_probes()]


def warn() -> Iterator[str]:
    """What may be a problem, and is not yet one."""
    import torch

    if _minor() > NEWEST:
        yield f"torch {torch.__version__} is newer than {_dotted(NEWEST)}, the newest that sternway was tested with"


def _show(findings: list[Finding], probes: list[ProbeResult], warnings: list[str]) -> None:
    console = Console()
    table = Table(title=f"sternway {__version__}")
    for heading in ("", "what", "found", "how to get it"):
        table.add_column(heading)
    for finding in findings:
        mark = "[green]✓[/green]" if finding.found else "[red]✗[/red]" if finding.needed else "[yellow]–[/yellow]"
        table.add_row(mark, finding.what, finding.found or "missing", "" if finding.found else finding.fix)
    console.print(table)
    failed = sum(probe.fault is not None for probe in probes)
    table = Table(title=f"Private names of torch: {len(probes) - failed} of {len(probes)} do what we need")
    for heading in ("name", "needed by", "result"):
        table.add_column(heading, overflow="fold")
    for probe in sorted(probes, key=lambda probe: probe.fault is None):
        bad = f"[red]it {escape(probe.expected)}: {escape(probe.fault)}[/red]" if probe.fault is not None else ""
        table.add_row(escape(probe.name), ", ".join(probe.features), bad or "[green]ok[/green]")
    console.print(table)
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)


def _minor() -> tuple[int, ...]:
    """Major and minor number of this torch."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _build() -> str:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}"


def _cuda() -> str:
    import torch

    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _backends() -> list[str]:
    from torch import distributed

    if not distributed.is_available():
        return []
    present = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return [name for name, there in present.items() if there]


def _ranks() -> str:
    """How many ranks a pipeline may have on this machine."""
    import torch

    backends, gpus, cores = _backends(), torch.cuda.device_count(), os.cpu_count() or 1
    if "gloo" not in backends:  # what ranks tell each other travels over it, on GPUs too
        return ""
    on_gpus = (
        f"{gpus} on GPUs, one each, over NCCL" if "nccl" in backends else "none on GPUs, as this torch has no NCCL"
    )
    return f"{f'{on_gpus}; ' if gpus else ''}{cores} on the CPU, one for each core, over gloo"


def _first_on_path(*names: str) -> str:
    return next((path for name in names if name and (path := shutil.which(name))), "")
