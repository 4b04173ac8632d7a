"""Wake a thread that waits in gloo, by shutting down the sockets it waits on.

gloo has no call for that: neither abort, nor shutdown, nor destroying a group ends a wait that has begun. A closed
connection does. So the sockets that a process group opens are noted when it is made, from what the kernel lists.
"""

from __future__ import annotations

import os
import socket

FOLDER = "/proc/self/fd"

Sockets = frozenset[tuple[int, str]]  # file descriptors, each with the kernel's name for its socket


def opened() -> Sockets:
    """The sockets that this process has open; none on systems that do not list them."""
    found = set()
    try:
        names = os.listdir(FOLDER)
    except OSError:
        return frozenset()
    for name in names:
        try:
            target = os.readlink(f"{FOLDER}/{name}")
        except OSError:
            continue  # closed in the meantime
        if target.startswith("socket:"):
            found.add((int(name), target))
    return frozenset(found)


def cut(sockets: Sockets, spared_port: int | None = None) -> None:
    """Shut these sockets down, unless their file descriptor now belongs to something else.

    Connections from or to ``spared_port`` stay: the store that the process holds may accept one at any time, also while
    a process group is being made.
    """
    for descriptor, target in sockets:
        try:
            if os.readlink(f"{FOLDER}/{descriptor}") != target:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # getpeername fails for a listening socket; gloo would end the process if that were cut
                ends = connection.getsockname(), connection.getpeername()
                if not any(spared_port in end[1:2] for end in ends):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
