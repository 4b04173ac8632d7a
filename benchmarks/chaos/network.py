"""Two machines on one: training across two network namespaces, over a link that is cut, heals, and is slow.

    sudo python benchmarks/chaos/network.py [--cut 1.0] [--long-cut 12.0] [--json]

Each namespace has an address and a torchrun of its own, as docs/scale.md has it for two machines. The link is cut for
a moment, which training does not notice but for the time; then for longer than a rank may be silent, upon which both
sides say so, torchrun starts them again, and training goes on from the last checkpoint. Where the kernel has netem, the
link is slow and drops packets all along; where it has not, it is slow only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
_OWN = os.getpid()  # names of one's own: two runs on one machine do not touch each other's
NAMES, LINKS = (f"sternway-a-{_OWN}", f"sternway-b-{_OWN}"), (f"sw-a-{_OWN}", f"sw-b-{_OWN}")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29400
SLOW = {
    "5 ms and losses": "netem delay 5ms 2ms loss 0.5%",
    "20 Mbit/s": "tbf rate 20mbit burst 64kbit latency 50ms",
}


def possible() -> str:
    """Why two namespaces cannot be had here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no ip command (apt install iproute2)"
    made = subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", NAMES[0]], check=False)
    return ""


class TwoMachines:
    """Two namespaces and the link between them, by the first of ``shapes`` that can be had; all is gone at the end."""

    def __init__(self, shapes: dict[str, str] = SLOW) -> None:
        self._shapes = shapes

    def __enter__(self) -> TwoMachines:
        self._remove()
        _ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for name, address, link in zip(NAMES, ADDRESSES, LINKS, strict=True):
            _ip("netns", "add", name)
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
        self.link = next((kind for kind, how in self._shapes.items() if self._shape(how)), "plain")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _shape(self, how: str) -> bool:
        """Make the link worse, if the kernel knows how."""
        return all(
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", *how.split()],
                capture_output=True,
                check=False,
            ).returncode
            == 0
            for name, link in zip(NAMES, LINKS, strict=True)
        )

    def cut(self, seconds: float) -> None:
        """Take the link down, and up again."""
        _ip("-n", NAMES[0], "link", "set", LINKS[0], "down")
        time.sleep(seconds)
        _ip("-n", NAMES[0], "link", "set", LINKS[0], "up")

    def start(self, number: int, log: Path, *arguments: str, program: Path = EXAMPLE) -> subprocess.Popen[bytes]:
        """A torchrun on one of the machines."""
        command = ["ip", "netns", "exec", NAMES[number], sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", "sternway"]
        command += [
            "--rdzv-conf",
            f"is_host={int(number == 0)}",
            "--local-addr",
            ADDRESSES[number],
            str(program),
            *arguments,
        ]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": LINKS[number],
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        with open(log, "wb") as file:
            return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def story(
    folder: Path, steps: int, cuts: list[float], limit: float = 240.0, heartbeat_timeout: float = 5
) -> dict[str, Any]:
    """Train ``steps`` steps; the link is cut each time that some more are saved."""
    saved = folder / "checkpoints"
    with TwoMachines() as machines:
        arguments = ["--steps", str(steps), "--checkpoint", str(saved), "--save-every", "2"]
        arguments += ["--dim", "32", "--microbatches", "4", "--heartbeat-timeout", str(heartbeat_timeout)]
        started = [machines.start(number, folder / f"machine-{number}.log", *arguments) for number in range(2)]
        end = time.monotonic() + limit
        try:
            for place, seconds in enumerate(cuts):
                while _newest(saved) < 2 * (place + 1) and time.monotonic() < end and started[0].poll() is None:
                    time.sleep(0.05)
                machines.cut(seconds)
            codes = [_end_of(process, end) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        logs = [(folder / f"machine-{number}.log").read_text(errors="replace") for number in range(2)]
        return {
            "exit": codes,
            "saved": _newest(saved),
            "cuts": cuts,
            "link": machines.link,
            "reported": ["LostRankError" in log for log in logs],
            "went_on": logs[0].count("going on from"),
            "logs": logs,
        }


def _end_of(process: subprocess.Popen[bytes], end: float) -> int | None:
    """How it ended; None if it did not in time."""
    try:
        return process.wait(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _newest(folder: Path) -> int:
    steps = [int(path.name[5:]) for path in folder.glob("step-????????")] if folder.exists() else []
    return max(steps, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", type=float, default=1.0)
    parser.add_argument("--long-cut", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if why := possible():
        print(f"two network namespaces cannot be had here: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        found = story(Path(folder), steps=16, cuts=[arguments.cut, arguments.long_cut], limit=600)
    logs = found.pop("logs")
    if found["exit"] != [0, 0]:
        print(*logs, sep="\n----\n", file=sys.stderr)
    print(json.dumps(found))
    return 0 if found["exit"] == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
