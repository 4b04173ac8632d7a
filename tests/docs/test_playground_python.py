"""The Python of the playground: what is packed for the browser is all that it imports."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

from sternway import schedule

PACK = Path(__file__).parents[2] / "docs" / "site" / "schedules.py"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import model
from sternway import schedule
found = schedule.compare(schedule.Costs(), ranks=2, microbatches=3, memory_limit=2)
print(json.dumps([row.name for row in found.rows]))
"""


def test_it_runs_with_nothing_else_installed(tmp_path: Path) -> None:
    packed = tmp_path / "sternway.zip"
    packed.write_bytes(runpy.run_path(str(PACK))["schedules"]())
    bare = [sys.executable, "-I", "-S", "-c", PROGRAM, str(packed)]  # no site-packages
    found = subprocess.run(bare, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    expected = schedule.compare(schedule.Costs(), ranks=2, microbatches=3, memory_limit=2)
    assert json.loads(found.stdout) == [row.name for row in expected.rows]
