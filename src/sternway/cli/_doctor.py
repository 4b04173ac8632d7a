"""``sternway doctor``: what this machine has, what is missing, and whether this torch does what we need."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.markup import escape

from sternway import __version__
from sternway.cli._progress import moving_bar
from sternway.cli._table import TableColumn, show_table, stdout

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OLDEST, NEWEST = (2, 11), (2, 15)  # minor releases of torch that the tests have run on


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


def doctor(
    every: Annotated[
        bool, typer.Option("--all", help="List every private name of torch, not only those that fail.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check this machine and this torch: what is there, what is missing, how to get it. Exit 1 if it is not enough."""
    with moving_bar(as_json, "looking at this machine") as bar:
        findings, warnings = list(examine()), list(warn())
        probes = probe_torch(bar.update)
    well = all(finding.found for finding in findings if finding.needed) and not any(probe.fault for probe in probes)
    if as_json:
        record = {"well": well, "warnings": warnings}
        record["findings"] = [asdict(finding) for finding in findings]
        record["probes"] = [asdict(probe) for probe in probes]
        typer.echo(json.dumps(record))
    else:
        _show(findings, probes, warnings, every)
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


def probe_torch(progress: Callable[[int, int, str], None] = lambda done, total, text: None) -> list[ProbeResult]:
    """The result of every probe."""
    from sternway._torch import all_probes

    probes = all_probes()
    found: list[ProbeResult] = []
    for probe in probes:
        progress(len(found), len(probes), f"probing {probe.name.partition(',')[0][:40]}")
        found.append(ProbeResult(probe.name, probe.features, probe.expected, probe.fault()))
    return found


def warn() -> Iterator[str]:
    """What may be a problem, and is not yet one."""
    import torch

    if _minor() > NEWEST:
        yield f"torch {torch.__version__} is newer than {_dotted(NEWEST)}, the newest that sternway was tested with"


def _show(findings: list[Finding], probes: list[ProbeResult], warnings: list[str], every: bool) -> None:
    console = stdout()
    marks = ["✓" if finding.found else "✗" if finding.needed else "–" for finding in findings]
    show_table(
        (TableColumn("", right=False), TableColumn("what", right=False), TableColumn("found", right=False, wrap=True)),
        [
            (mark, finding.what, finding.found or f"missing; {finding.fix}")
            for mark, finding in zip(marks, findings, strict=True)
        ],
        title=f"sternway {__version__}",
        styles=[{"✓": "", "✗": "red", "–": "dim"}[mark] for mark in marks],
    )
    failed = [probe for probe in probes if probe.fault is not None]
    good = len(probes) - len(failed)
    console.print(
        f"Private names of torch: {good} of {len(probes)} do what we need", style="" if not failed else "red", end=""
    )
    console.print("." if every or failed else "; doctor --all lists them.", highlight=False)
    if listed := failed + [probe for probe in probes if probe.fault is None and every]:
        show_table(
            [TableColumn(name, right=False, wrap=True) for name in ("name", "needed by", "result")],
            [
                (probe.name, ", ".join(probe.features), "ok" if probe.fault is None else _fault(probe))
                for probe in listed
            ],
            styles=["red" if probe.fault is not None else "" for probe in listed],
        )
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)


def _fault(probe: ProbeResult) -> str:
    return f"it {probe.expected}: {probe.fault}"


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
