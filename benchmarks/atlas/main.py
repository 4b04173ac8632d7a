"""Is what the atlas writes true, and what does it cost? Over the installed torch package, or any package.

    python benchmarks/atlas/main.py [--source FOLDER] [--json] [--pages FOLDER]

Truth: every claim is read back from the written Markdown (``claims.py``) and compared with a table made apart from the
atlas (``truth.py``: ast, symtable and tokenize). Cost: ``sternway atlas`` as a command, cold, then unchanged, then cold
again into another folder, whose bytes are compared. Memory is the largest sum over the command and its workers, sampled
from /proc every 50 ms. ``--pages``: compare pages that are there already, and time nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import claims
from checked import Checked
from truth import Truth

MIB = 2**20


@dataclass(frozen=True)
class Row:
    kind: str
    claimed: int
    true: int
    precision: float
    recall: float


@dataclass(frozen=True)
class Cost:
    what: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    report: dict[str, object]


def run(source: Path, out: Path, what: str) -> Cost:
    """The command, timed and weighed."""
    command = [sys.executable, "-c", "from sternway.cli import main; main()", "atlas", str(source), "--out", str(out)]
    before, start = os.times(), time.perf_counter()
    process = subprocess.Popen([*command, "--include", "*.py", "--json"], stdout=subprocess.PIPE)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, sum(map(_resident, family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    text, _ = process.communicate()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(what, seconds, used, peak / MIB, json.loads(text))


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def compare(source: Path, out: Path, *, words: bool = True) -> list[Row]:
    """Precision and recall of each kind of claim. ``words``: of the identifiers and words on keyword pages too."""
    said, truth = claims.read(out, words=words), Truth(source, words=words)
    related = Checked(truth, said)
    rows = []
    for kind in sorted({*truth.claims, *said}):
        wanted = truth.claims.get(kind, set())
        found = {claim for claim in said[kind] if claim[0] in truth.files}
        right = related.right(kind, found, found & wanted)
        missing = related.missing(kind, wanted, wanted - found)
        total = len(wanted) if wanted else len(right)
        hit = total - len(missing)
        rows.append(Row(kind, len(found), total, len(right) / max(len(found), 1), hit / max(total, 1)))
        if kind in os.environ.get("ATLAS_SHOW", "").split("/"):
            print(
                kind,
                "WRONG",
                *sorted(found - right, key=str)[:12],
                "MISSING",
                *sorted(missing, key=str)[:12],
                sep="\n  ",
            )
    return [row for row in rows if row.claimed or row.true]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, help="a package's folder; the installed torch if not given")
    parser.add_argument("--pages", type=Path, help="pages of that source: only compare them with the truth")
    parser.add_argument("--without-words", action="store_true", help="leave out keyword pages, which take most time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    source = args.source.resolve() if args.source else _torch()
    costs: list[Cost] = []
    same = None
    with tempfile.TemporaryDirectory() as folder:
        out = args.pages or Path(folder) / "first"
        if not args.pages:
            costs = [
                run(source, out, "cold"),
                run(source, out, "unchanged"),
                run(source, Path(folder) / "second", "cold again"),
            ]
            same = digests(out) == digests(Path(folder) / "second")
        rows = compare(source, out, words=not args.without_words)
    if args.json:
        print(
            json.dumps(
                {"costs": [asdict(cost) for cost in costs], "same_bytes": same, "rows": [asdict(row) for row in rows]}
            )
        )
        return
    print(f"{source.name}: Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    if costs:
        head = ("run", "wall", "CPU", "peak memory, all processes", "pages written", "broken links")
        print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * 5}")
        for cost in costs:
            broken = len(cost.report["broken"])  # type: ignore[arg-type]
            times = f"{cost.seconds:.1f} s | {cost.cpu_seconds:.1f} s | {cost.peak_mib:,.0f} MiB"
            print(f"| {cost.what} | {times} | {cost.report['written']:,} | {broken} |")
        print(f"\nThe two cold runs wrote {'the same' if same else 'DIFFERENT'} bytes.\n")
    print("| kind of claim | claimed | true | precision | recall |\n| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row.kind} | {row.claimed:,} | {row.true:,} | {row.precision:.4f} | {row.recall:.4f} |")


def _torch() -> Path:
    code = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    return Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    main()
