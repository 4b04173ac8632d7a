"""How long a search takes in a built site, in Chromium: ``python benchmarks/atlas/search.py SITE``.

Each query is asked once to load what it needs, then eleven times; the time is that of finding and ranking, without
drawing. The site is opened from disk.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

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
  for (let i = 0; i < 11; i++) {
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
        head = "| query | results | first | median, ms | largest, ms |\n| --- | ---: | --- | ---: | ---: |"
        print(f"load {os.getloadavg()[0]:.1f}\n\n{head}")
        for query in QUERIES:
            count, first, times = browser.run(_TIMES.replace("QUERY", json.dumps(query)))
            print(f"| {query} | {count:,} | `{first}` | {statistics.median(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
