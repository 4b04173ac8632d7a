"""The Python of a page of documentation, to run it.

A page's blocks follow each other like cells of a notebook. HTML comments, which readers do not see, say how to run it:

    <!-- setup ... -->           Python that comes before the blocks after it
    <!-- ranks: 2 -->            the page needs so many processes, as torchrun starts them
    <!-- needs: transformers --> the page needs this package
    <!-- fresh -->               what follows begins anew, in processes of its own
    <!-- not run: why -->        the next block is not run, and why
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from gloo import on_ranks

ROOT = Path(__file__).parents[1]

_PARTS = re.compile(
    r"```python\n(?P<code>.*?)```"
    r"|<!-- setup\n(?P<setup>.*?)-->"
    r"|<!-- ranks: (?P<ranks>\d+) -->"
    r"|<!-- needs: (?P<needs>\w+) -->"
    r"|(?P<fresh><!-- fresh -->)"
    r"|(?P<skip><!-- not run: [^>]+ -->)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Program:
    """Blocks that run one after the other.

    Attributes:
        source: the Python of all blocks.
        ranks: how many processes; 1 starts none besides the one.
        needs: packages that it imports and that may be missing.
        not_run: how many blocks were left out.
    """

    source: str
    ranks: int
    needs: tuple[str, ...]
    not_run: int = 0


def programs(page: str, *, apart: bool = False) -> list[Program]:
    """The programs of a page; with ``apart``, each block is one.

    Example:
        >>> programs("```python\\na = 1\\n```\\n```python\\nb = a\\n```\\n")[0].source
        'a = 1\\nb = a\\n'
    """
    found: list[Program] = []
    source, ranks, needs, skip, left = "", 1, [], False, 0
    for part in _PARTS.finditer(page):
        if part["fresh"]:
            found.append(Program(source, ranks, tuple(needs), left))
            source, ranks, needs, left = "", 1, [], 0
        elif part["ranks"]:
            ranks = int(part["ranks"])
        elif part["needs"]:
            needs.append(part["needs"])
        elif part["skip"]:
            skip = True
        elif skip and part["code"]:
            skip, left = False, left + 1
        else:
            source += part["code"] or part["setup"] or ""
            if apart and part["code"]:
                found.append(Program(source, ranks, tuple(needs), left))
                source, ranks, needs, left = "", 1, [], 0
    found.append(Program(source, ranks, tuple(needs), left))
    return [program for program in found if program.source.strip()]


def run(program: Program, folder: Path) -> str:
    """What it prints, rank after rank. Its processes are forked from a warm one, which saves most of the time.

    Raises:
        AssertionError: if it fails; a warning of a program with one process is a failure, too.
    """
    if program.needs:  # what these packages import and warn of is not for the warm process
        return run_alone(program, folder, sys.executable)
    _write(program, folder)
    on_ranks(program.ranks, _play, str(folder), program.ranks == 1, join=_as_torchrun)
    return "".join((folder / f"printed-{rank}").read_text() for rank in range(program.ranks))


def run_alone(program: Program, folder: Path, python: str | Path) -> str:
    """What it prints as a reader would run it: by this Python, or by its torchrun."""
    command = [str(python)]
    if program.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command.append(str(_write(program, folder)))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _write(program: Program, folder: Path) -> Path:
    file = folder / "train.py"
    others = "import zoo.libraries\n" if program.needs else ""  # before any of these packages
    file.write_text(others + program.source)
    return file


def _as_torchrun(rank: int, world: int, port: int) -> None:
    """Set the variables by which a process knows its place; the program joins the others itself."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _play(rank: int, folder: str, strict: bool) -> None:
    os.chdir(folder)
    if strict:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)  # Inductor's
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # Dynamo's
    with open(f"printed-{rank}", "w") as printed, redirect_stdout(printed), suppress(SystemExit):
        runpy.run_path("train.py", run_name="__main__")
