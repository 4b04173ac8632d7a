"""A call beside the training, in a process of its own. A thread would hold up what trains, which needs Python, too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

# What is printed must not get between the bytes of the result. The lowest priority: what trains comes first. When that
# has ended, nobody wants the result.
_PROGRAM = """
import os, pickle, sys, threading, time
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
if hasattr(os, "nice"):
    os.nice(19)
parent, sys.path[:] = pickle.load(sys.stdin.buffer)
def watch():
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
out.write(pickle.dumps(pickle.load(sys.stdin.buffer)()))
out.close()
"""


def beside(call: Callable[[], T]) -> Future[T]:
    """Begin a call, and return its result to come. If no process can be started, it runs in a thread.

    Args:
        call: a function of a module, or a ``functools.partial`` of one, that needs nothing of this process.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(_apart(call))
        except Exception as error:
            found.set_exception(error)

    Thread(target=run, name="sternway-beside", daemon=True).start()
    return found


def _apart(call: Callable[[], T]) -> T:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=pickle.dumps((os.getpid(), sys.path)) + pickle.dumps(call),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no process, or the call has failed there: here one sees how
        return call()
    result: Any = pickle.loads(done.stdout)
    return result  # type: ignore[no-any-return]  # what the call returned there
