"""Wake a thread that waits in gloo: cut the connections that it waits on.

gloo has no call for that: neither abort nor shutdown nor destroying a group ends a wait that has begun. A connection
that is closed does. So the sockets that a process group opened are noted when it is made, by what the kernel lists.
"""

from __future__ import annotations

import os
import socket

FOLDER = "/proc/self/fd"

Sockets = frozenset[tuple[int, str]]  # descriptors, each with what the kernel calls it


def opened() -> Sockets:
    """This process's sockets; none where the kernel does not list them."""
    found = set()
    try:
        names = os.listdir(FOLDER)
    except OSError:
        return frozenset()
    for name in names:
        try:
            target = os.readlink(f"{FOLDER}/{name}")
        except OSError:
            continue  # closed since
        if target.startswith("socket:"):
            found.add((int(name), target))
    return frozenset(found)


def cut(sockets: Sockets) -> None:
    """End these connections, where they are still the ones they were."""
    for descriptor, target in sockets:
        try:
            if os.readlink(f"{FOLDER}/{descriptor}") != target:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # one that only listens has none, and gloo ends the process if that is cut
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
