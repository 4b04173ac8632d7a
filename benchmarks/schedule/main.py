"""Quality and speed of schedules: the zero-bubble paper's rows beside ours, and how long we take.

python benchmarks/schedule/main.py [--json] [--quick]
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sternway.schedule import Costs, lower_bound, make, search

ROWS = Path(__file__).parents[2] / "tests" / "data" / "zero_bubble.json"
SIZES = ((8, 64), (32, 256), (64, 512))
COSTS = Costs(F=18.522, I=18.086, W=9.337, comm=0.601, memory_after_I=0.3664)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long the work took, in seconds, and what came out."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def quality() -> list[dict[str, Any]]:
    """Return one record for each of the paper's rows: its bubble rates, and ours under the same limits."""
    records = []
    for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]:
        costs = Costs(**{name: row[name] for name in ("F", "I", "W", "comm", "memory_after_I")})
        numbers = {"ranks": row["ranks"], "microbatches": row["microbatches"]}
        record: dict[str, Any] = {"model": row["model"], **numbers, "paper": row["bubble_rate"]}
        record["ours"] = {
            name: make(name, **numbers).simulate(costs).bubble_rate for name in ("1f1b", "zb-h1", "zb-h2")
        }
        for label, limit in (("1p", row["ranks"]), ("2p", 2 * row["ranks"])):
            for stages_per_rank, name in ((1, "search"), (2, "search-v")):
                asked = {**numbers, "memory_limit": limit, "stages_per_rank": stages_per_rank}
                seconds, found = timed(lambda asked=asked, costs=costs: search(costs, **asked))
                timeline = found.simulate(costs)
                record["ours"][f"{name}-{label}"] = timeline.bubble_rate
                record[f"{name}-{label}"] = {
                    "seconds": seconds,
                    "peak_memory": timeline.peak_memory,
                    "over_bound": timeline.span / lower_bound(costs, **asked) - 1,
                }
        records.append(record)
    return records


def speed(sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Return how long search takes at each size and limit, and simulate and check at the largest."""
    records = []
    for ranks, microbatches in sizes:
        for limit in (ranks // 2, ranks, 2 * ranks):
            asked = {"ranks": ranks, "microbatches": microbatches, "memory_limit": limit}
            seconds, found = timed(lambda asked=asked: search(COSTS, **asked))
            over = found.simulate(COSTS).span / lower_bound(COSTS, **asked) - 1
            records.append({"what": "search", **asked, "seconds": seconds, "over_bound": over})
    ranks, microbatches = sizes[-1]
    found = make("zb-h2", ranks=ranks, microbatches=microbatches)
    for what, work in (("simulate", lambda: found.simulate(COSTS)), ("check", found.check)):
        seconds = min(timed(work)[0] for _ in range(3))
        records.append({"what": what, "ranks": ranks, "microbatches": microbatches, "seconds": seconds})
    return records


def print_quality(records: list[dict[str, Any]]) -> None:
    """Print the paper's rows beside ours: bubble rates, the paper's in brackets."""
    names = ("1f1b", "zb-h1", "zb-h2")
    print("bubble rate, ours (the paper's); above the proven lower bound")
    searches = ("search, limit p (zb-1p)", "search, limit 2p (zb-2p)", "search-v, p", "search-v, 2p")
    lines = [["model", "m", *names, *searches]]
    for record in records:
        ours, paper = record["ours"], record["paper"]
        line = [record["model"], str(record["microbatches"])]
        line += [f"{ours[name]:.4f} ({paper[name]:.4f})" for name in names]
        for label in ("1p", "2p"):
            over = record[f"search-{label}"]["over_bound"]
            line.append(f"{ours[f'search-{label}']:.4f} ({paper[f'zb-{label}']:.4f}) +{max(0.0, over):.2%}")
        for label in ("1p", "2p"):
            over = record[f"search-v-{label}"]["over_bound"]
            line.append(f"{ours[f'search-v-{label}']:.4f} +{max(0.0, over):.2%}")
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_speed(records: list[dict[str, Any]]) -> None:
    """Print the times, one line for each."""
    print("\nseconds, one core")
    for record in records:
        line = f"{record['what']:<9}{record['ranks']:>3} x {record['microbatches']:<4}"
        if record["what"] == "search":
            over = max(0.0, record["over_bound"])
            line += f"limit {record['memory_limit']:<4} {record['seconds']:8.2f}   +{over:.2%} above the bound"
        else:
            line += f"           {record['seconds']:8.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print records instead of tables")
    parser.add_argument("--quick", action="store_true", help="leave out the two larger sizes")
    asked = parser.parse_args()
    rows, times = quality(), speed(SIZES[:1] if asked.quick else SIZES)
    if asked.json:
        environment = {"python": platform.python_version(), "machine": platform.machine()}
        json.dump({"environment": environment, "quality": rows, "speed": times}, sys.stdout, indent=1)
        print()
        return
    print_quality(rows)
    print_speed(times)


if __name__ == "__main__":
    main()
