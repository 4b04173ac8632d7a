"""The sockets of process groups: wake a thread that waits on them, and see whether another process has closed its end.

gloo has no call to wake a thread: neither abort, nor shutdown, nor destroying a group ends a wait that has begun. A
closed connection does. So the sockets that a process group opens are noted when it is made, from what the kernel lists.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

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


def connected(sockets: Sockets, spared_port: int | None = None) -> Sockets:
    """Those of these sockets that have another end, except connections from or to ``spared_port``.

    The store that a process holds may accept a connection at any time, also while a process group is being made.
    """
    return frozenset(found.entry for found in _connections(sockets, spared_port))


def any_closed(sockets: Sockets) -> bool:
    """Whether one of these sockets is closed, here or at its other end. Reads nothing from them, and does not wait."""
    poll = select.poll()
    for descriptor, target in sockets:
        if not _is(descriptor, target):
            return True
        poll.register(descriptor, select.POLLRDHUP)
    hung_up = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    return any(events & hung_up for _, events in poll.poll(0))


def cut(sockets: Sockets, spared_port: int | None = None) -> None:
    """Shut these sockets down, except connections from or to ``spared_port``."""
    for found in _connections(sockets, spared_port):
        with suppress(OSError):
            found.connection.shutdown(socket.SHUT_RDWR)


def ends(sockets: Sockets, spared_port: int | None = None) -> list[str]:
    """This side of these connections, as addresses; except those from or to ``spared_port``."""
    return [_address(found.own) for found in _connections(sockets, spared_port)]


def leading_to(addresses: Collection[str], sockets: Sockets) -> Sockets:
    """Those of these sockets whose other end is one of these addresses."""
    found = _connections(sockets, None)
    return frozenset(each.entry for each in found if _address(each.other) in addresses)


def _address(end: tuple[Any, ...]) -> str:
    return f"{end[0]} {end[1]}"


class _Connection(NamedTuple):
    """A connection to another process, and its two ends: each a host, a port and more."""

    entry: tuple[int, str]
    connection: socket.socket
    own: tuple[Any, ...]
    other: tuple[Any, ...]


def _connections(sockets: Sockets, spared_port: int | None) -> Iterator[_Connection]:
    """Those of these sockets that are connections over a network, which ranks have; not Unix sockets."""
    for descriptor, target in sockets:
        with suppress(OSError):
            if _is(descriptor, target):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    # getpeername fails for a listening socket; gloo would end the process if that were cut
                    own, other = found.getsockname(), found.getpeername()
                    if spared_port not in (own[1], other[1]):
                        yield _Connection((descriptor, target), found, own, other)


def _is(descriptor: int, target: str) -> bool:
    """Whether a file descriptor still belongs to this socket, and not to something else by now."""
    try:
        return os.readlink(f"{FOLDER}/{descriptor}") == target
    except OSError:
        return False
