"""The sweeps over torch's own samples, as a program: the split, policies for saved tensors, the compiled split.

python tests/upstream/opsweep.py                             # all of them; exit code 1 if anything is wrong
python tests/upstream/opsweep.py split --share 8 --of 3      # an eighth of one
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable

from sweep import Tally, sweep
from sweep_compiled import sweep_compiled
from sweep_saved import sweep_saved

SWEEPS: dict[str, Callable[[Callable[[int], bool]], Tally]] = {
    "split": sweep,
    "saved": sweep_saved,
    "compiled": sweep_compiled,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", choices=[*SWEEPS, []], help="which, unless all")
    parser.add_argument("--share", type=int, default=1, help="sweep one part of so many")
    parser.add_argument("--of", type=int, default=0, help="which part, from 0")
    parser.add_argument("--verbose", action="store_true", help="print every difference")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    faults = 0
    for name in asked.sweeps or SWEEPS:
        tally = SWEEPS[name](lambda number: number % asked.share == asked.of)
        if asked.verbose:
            print(*tally.changed, *tally.faults, sep="\n")  # noqa: T201 - a program
        print(f"{name}: {tally}", flush=True)  # noqa: T201
        faults += len(tally.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
