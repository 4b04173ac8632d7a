"""How long a search takes in a built site, in Chromium: ``python benchmarks/atlas/search.py SITE``.

Each query is asked once to load what it needs, then 51 times; the time is that of finding and ranking, without drawing.
CPU is the time that all of Chromium's processes used, which other programs on the machine change little. The site is
opened from disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from main import family

QUERIES = (
    "backward",
    "data loader worker",
    "register_hook",
    "optimzer",
    "nn module forward",
    "grad",
    "tensor parallel",
    "in",
    "self in get",
)
_TIMES = """
(async () => {
  const found = await atlas.find(QUERY, "");
  const times = [];
  for (let i = 0; i < 51; i++) {
    const start = performance.now();
    await atlas.find(QUERY, "");
    times.push(performance.now() - start);
  }
  return [found.total, found.hits[0]?.name ?? "", times];
})()
"""


def main(site: Path) -> None:
    from browser import Browser

    with Browser() as browser:
        browser.open(site / "index.html")
        browser.run("(async () => { await atlas.find('xx', ''); })()")
        head = "| query | results | first | CPU, ms | smallest, ms | median, ms |\n| --- | ---: | --- |" + " ---: |" * 3
        print(f"load {os.getloadavg()[0]:.1f}\n\n{head}")
        for query in QUERIES:
            before = cpu_seconds(os.getpid())
            count, first, times = browser.run(_TIMES.replace("QUERY", json.dumps(query)))
            used = (cpu_seconds(os.getpid()) - before) * 1000 / (len(times) + 1)
            shown = f"{used:.1f} | {min(times):.1f} | {statistics.median(times):.1f}"
            print(f"| {query} | {count:,} | `{first}` | {shown} |")


def cpu_seconds(pid: int) -> float:
    """What a process and all below it, which are Chromium, have used so far."""
    ticks = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
