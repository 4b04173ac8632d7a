"""A call beside the training, in a process of its own. A thread would hold up what trains, which needs Python, too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
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

    To cancel the result ends the process.

    Args:
        call: a function of a module, or a ``functools.partial`` of one, that needs nothing of this process.
    """
    found: Future[T] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            try:
                found.set_result(_apart(call, found))
            except Exception as error:
                found.set_exception(error)

    Thread(target=run, name="sternway-beside", daemon=True).start()
    return found


def _apart(call: Callable[[], T], found: Future[T]) -> T:
    given = pickle.dumps((os.getpid(), sys.path)) + pickle.dumps(call)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return call()
    found.add_done_callback(lambda _: process.kill())  # at once if it was cancelled before; nothing if it has ended
    with process:
        output = process.communicate(given)[0]
    if found.cancelled():
        raise InvalidStateError
    if process.returncode < 0:  # here it would take the memory, or whatever it was, that it was ended for
        raise RuntimeError(f"its process was ended by signal {-process.returncode}")
    if process.returncode:  # the call has failed there: here one sees how
        return call()
    result: Any = pickle.loads(output)
    return result  # type: ignore[no-any-return]  # what the call returned there
