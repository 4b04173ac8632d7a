"""A real Chromium, driven over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
WAIT = 300.0  # seconds after which Chromium is taken to hang


def find() -> str:
    """Chromium's path; skips the test where there is none, unless STERNWAY_REQUIRE_BROWSER says that there must be."""
    path = next((found for name in NAMES if (found := shutil.which(name))), "")
    if not path:
        if os.environ.get("STERNWAY_REQUIRE_BROWSER") == "1":
            pytest.fail("STERNWAY_REQUIRE_BROWSER=1, but no Chromium is on the path")
        pytest.skip("no Chromium on the path: apt install chromium")
    return path


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe at descriptors far above 3 and 4, so that putting one there can close no other."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class ProtocolError(AssertionError):
    """Chromium did not do what it was asked to."""


class Browser:
    """One tab. Messages are JSON, each ended by a zero byte; the browser reads descriptor 3 and writes descriptor 4."""

    def __init__(self, width: int = 1400, height: int = 860) -> None:
        chromium = find()  # skips the test if there is none: before anything is made that nobody would clean up
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", chromium, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []  # whatever the page or the browser complained of
        self.requests: list[str] = []  # whatever the page asked for
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise ProtocolError(answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + WAIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer from Chromium within {WAIT} s"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium went away"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path) -> float:
        """Open a report and wait until it is drawn; the milliseconds that took, by the page's own clock."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            ready = self.look("document.documentElement && document.documentElement.dataset.ready || ''")
            if ready:
                return float(ready)
            assert not self.errors, self.errors
            time.sleep(0.05)
        raise AssertionError(f"{path} was not drawn within {WAIT} s: {self.errors}")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, script: str) -> Any:
        """The value of an expression; None while the browser is on its way to another page."""
        try:
            return self.run(script)
        except ProtocolError:
            return None

    def press(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39}
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = text or (key if len(key) == 1 else "\r" if key == "Enter" else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int = 860) -> None:
        """Make the window so large."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def drag(self, start: tuple[float, float], end: tuple[float, float], *, shift: bool = False) -> None:
        """Press the mouse at one place and let go at another; the same place is a click."""
        keys: dict[str, Any] = {"button": "left", "clickCount": 1, "modifiers": 8 if shift else 0}
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        steps = (("mouseMoved", start), ("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end))
        for kind, (x, y) in (*steps, ("mouseReleased", end)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=int(kind != "mouseReleased"), **keys)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel at a place; below 0 is away from oneself."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.settle()

    def overflow(self) -> int:
        """By how many pixels the page, or what scrolls in it, is wider than the window."""
        return self.run(
            "Math.max(...[document.documentElement, ...document.querySelectorAll('.view.on')]"
            ".map(e => e.scrollWidth - e.clientWidth))"
        )

    def barriers(self) -> list[str]:
        """What axe-core finds that keeps people with a disability out: serious and critical faults."""
        if not self.run("typeof axe === 'object'"):
            self.run(AXE.read_text(encoding="utf-8") + "; 1")
        found = self.run("axe.run({resultTypes: ['violations']}).then(r => r.violations)")
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
