"""What it costs to capture a graph, to write it down and to look at it; torchviz beside it where it survives.

    python benchmarks/graph/main.py [--json] [--rounds N] [--screenshot PATH]

The chain is captured in a process of its own, so that its peak memory is its own. Times are medians over the rounds;
the capture's share of the forward is the median of the rounds' own ratios. The cycle collector is off while the clock
runs. Chromium's time is the page's own clock, from the request to the first picture.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from sternway import graph
from sternway.demo import GPT

CHAIN = 100_000
MIB = 2**20


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    limit: float | None = None


def chain() -> torch.Tensor:
    x = torch.ones(1, requires_grad=True)
    for _ in range(CHAIN):
        x = x * 1.0001
    return x


def measure_chain(rounds: int) -> dict[str, float]:
    """In the process of its own."""
    loss = chain()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    captured = graph.capture(loss)
    seconds = [time.perf_counter() - start]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(rounds - 1):
        start = time.perf_counter()
        graph.capture(loss)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    text = captured.to_json()
    write = time.perf_counter() - start
    start = time.perf_counter()
    same = graph.from_json(text) == captured
    read = time.perf_counter() - start
    return {
        "seconds": statistics.median(seconds),
        "first": seconds[0],
        "more_mib": (peak - before) / 1024,
        "peak_mib": peak / 1024,
        "write": write,
        "read": read,
        "json_mib": len(text.encode()) / MIB,
        "same": float(same),
    }


def measure_gpt(rounds: int) -> tuple[float, float, float, int]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(vocabulary=256, dim=256, heads=4, layers=12, length=64)
    tokens = torch.randint(0, 256, (2, 64))
    forwards, captures = [], []
    gc.collect()
    gc.disable()
    for index in range(rounds + 2):
        start = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        middle = time.perf_counter()
        captured = graph.capture(loss, model)
        end = time.perf_counter()
        if index >= 2:
            forwards.append(middle - start)
            captures.append(end - middle)
    gc.enable()
    ratio = statistics.median(taken / forward for taken, forward in zip(captures, forwards, strict=True))
    return statistics.median(forwards), statistics.median(captures), ratio, len(captured.nodes)


def torchviz_rows() -> list[str]:
    try:
        import torchviz
    except ImportError:
        return ["torchviz is not installed: pip install torchviz"]
    notes = []
    for depth in (500, 1100, CHAIN):
        x = torch.ones(1, requires_grad=True)
        for _ in range(depth):
            x = x * 1.0001
        start = time.perf_counter()
        try:
            torchviz.make_dot(x)
            notes.append(f"torchviz, chain of {depth:,}: {time.perf_counter() - start:.3f} s")
        except RecursionError:
            notes.append(f"torchviz, chain of {depth:,}: RecursionError")
    return notes


def measure_page(screenshot: Path | None) -> tuple[float, float] | None:
    """Seconds until Chromium has drawn the chain's page, and to open the boxes down to a node in its middle."""
    import shutil

    from browser import NAMES, Browser

    if not any(map(shutil.which, NAMES)):
        return None
    with tempfile.TemporaryDirectory() as folder, Browser(1280, 800) as browser:
        page = graph.capture(chain()).to_html(Path(folder) / "chain.html")
        opened = statistics.median(browser.open(page) for _ in range(3)) / 1000
        start = time.perf_counter()
        browser.run(f"sternway.views.Graph.picture.reveal({CHAIN // 2})")
        revealed = time.perf_counter() - start
        if screenshot is not None:
            _picture(browser, Path(folder), screenshot)
        assert browser.errors == []
        return opened, revealed


def _picture(browser: object, folder: Path, to: Path) -> None:
    """The demo's report, open at one block: the picture in the README."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, dim=128, heads=4, layers=4, length=64)
    with graph.record(model):
        loss = model(torch.randint(0, 256, (2, 64)))
    browser.open(graph.capture(loss, model).to_html(folder / "demo.html", title="Autograd graph of a small GPT"))
    browser.run(
        "(() => { const v = sternway.views.Graph, p = v.picture;"
        "p.reveal(v.tree.record.nodes.findIndex(n => n.kind === 'GeluBackward0' && n.module === 'blocks.3'));"
        "p.at.scale = 0.95; p.centre(p.chosen); })()"
    )
    browser.screenshot(to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--chain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.chain:
        print(json.dumps(measure_chain(min(3, options.rounds))))
        return
    command = [sys.executable, __file__, "--chain", "--rounds", str(options.rounds)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    forward, taken, ratio, nodes = measure_gpt(options.rounds)
    page = measure_page(options.screenshot)
    rows = [
        Row(f"chain of {CHAIN:,} nodes: capture", found["seconds"], "s", 3),
        Row("chain: the process's peak memory", found["peak_mib"], "MiB", 500),
        Row("chain: memory that the capture added", found["more_mib"], "MiB"),
        Row("chain: to JSON", found["write"], "s"),
        Row("chain: from JSON, and compared", found["read"], "s"),
        Row("chain: size of the JSON", found["json_mib"], "MiB"),
        Row(f"GPT, 12 layers, d=256, 2×64 tokens ({nodes} nodes): forward", 1000 * forward, "ms"),
        Row("GPT: capture", 1000 * taken, "ms"),
        Row("GPT: capture over forward", ratio, "", 1),
    ]
    if page is not None:
        rows += [
            Row("chain: Chromium opens the page", page[0], "s", 3),
            Row("chain: and opens the boxes down to its middle", page[1], "s"),
        ]
    notes = [*torchviz_rows(), "JSON round trip equal: " + ("yes" if found["same"] else "NO")]
    if page is None:
        notes.append("Chromium is not installed: the page was not timed")
    environment = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    if options.json:
        print(json.dumps({"environment": environment, "rows": [asdict(row) for row in rows], "notes": notes}))
        return
    print(f"{environment}\n\n| what | measured | at most |\n| --- | ---: | ---: |")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
        print(f"| {row.what} | {row.value:.2f} {row.unit} | {limit} |")
    print("\n" + "\n".join(f"- {note}" for note in notes))


if __name__ == "__main__":
    main()
