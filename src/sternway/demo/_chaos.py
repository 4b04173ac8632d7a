"""Train twice under torchrun, once undisturbed and once with processes killed: both must end with the same weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from sternway.errors import PipelineError


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """One run of training. ``kills`` are (step, rank): the first happens in the first life, and so on."""

    folder: str
    steps: int
    dim: int
    layers: int
    microbatches: int
    length: int = 32
    save_every: int = 4
    kills: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"  # or "cuda"; see ``choose_device``

    def to_json(self) -> str:
        """As text for the command line of the processes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ChaosOptions:
        """What ``to_json`` wrote."""
        content = json.loads(text)
        content["kills"] = tuple((step, rank) for step, rank in content["kills"])
        return ChaosOptions(**content)


@dataclass(frozen=True, slots=True)
class ChaosLog:
    """What the processes of one run noted: each note has a ``kind``, a ``time``, and more."""

    notes: list[dict[str, Any]]
    seconds: float

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The notes of a kind: "life", "step", "kill" or "done"."""
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def weights(self) -> str:
        """A digest of the weights at the end."""
        return str(self.of("done")[-1]["weights"]) if self.of("done") else ""


Heed: TypeAlias = Callable[[dict[str, Any]], None]


def train_with_kills(
    options: ChaosOptions, *, ranks: int, kills: int, heed: Heed = lambda note: None
) -> tuple[ChaosLog, ChaosLog]:
    """Train undisturbed, and then with ``kills`` processes killed at random; each run in its own folder.

    ``heed`` is called with each note of the processes, soon after it is made.

    Raises:
        PipelineError: a run did not finish, or a folder cannot be written to.
    """
    chance = random.Random(0)
    last = options.steps - 2
    moments = sorted(chance.sample(range(1, max(2, last)), min(kills, max(1, last - 1))))
    chosen = tuple((step, chance.randrange(ranks)) for step in moments)
    folder = Path(options.folder)
    runs = folder / "calm", folder / "chaos"
    try:
        undisturbed = _run(replace(options, folder=str(runs[0])), ranks, heed)
        return undisturbed, _run(replace(options, folder=str(runs[1]), kills=chosen), ranks, heed)
    except KeyboardInterrupt:
        for each in runs:
            shutil.rmtree(each, ignore_errors=True)
        with suppress(OSError):  # it has something else in it
            folder.rmdir()
        raise


def _run(options: ChaosOptions, ranks: int, heed: Heed) -> ChaosLog:
    folder = Path(options.folder)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise PipelineError("the folder must be writable", got=str(error), fix="choose another with --out") from None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(len(options.kills) + 1), "-m", "sternway.demo._chaos_rank", options.to_json()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a new life finds the addresses of the one before
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the same bits every time on a GPU
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    start = time.monotonic()
    torchrun = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )  # Ctrl-C does not reach it: this process ends it
    notes: list[dict[str, Any]] = []
    try:
        said = _follow(torchrun, folder / "notes.jsonl", notes, heed)
    except BaseException:
        _end(torchrun)
        raise
    if torchrun.returncode:
        raise PipelineError(
            "training under torchrun did not finish",
            got=f"exit {torchrun.returncode}: {said[-800:]}",
            fix=f"see the reports in {folder / 'reports'}",
        )
    return ChaosLog(notes, time.monotonic() - start)


def _follow(torchrun: subprocess.Popen[bytes], path: Path, notes: list[dict[str, Any]], heed: Heed) -> str:
    """Wait for the end, reading the notes as they come; return what was printed."""
    while True:
        try:
            said = torchrun.communicate(timeout=0.2)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            said = None
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []  # whole lines only
        for line in lines[len(notes) :]:
            notes.append(json.loads(line))
            heed(notes[-1])
        if said is not None:
            return said


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """End torchrun and its processes, whatever it is doing.

    It ends its own when it is asked to, but not while it starts them: then they would train on without it.
    """
    torchrun.send_signal(signal.SIGSTOP)  # it starts no more
    listed = [path.read_text().split() for path in Path(f"/proc/{torchrun.pid}/task").glob("*/children")]
    for started in (int(process) for each in listed for process in each):
        with suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)
    torchrun.send_signal(signal.SIGKILL if listed else signal.SIGTERM)  # not every system lists them
    torchrun.send_signal(signal.SIGCONT)
    torchrun.communicate()
