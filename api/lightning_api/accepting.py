"""Taking in connections: all that wait, and no more than a process can have."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Final

__all__ = ["Acceptor", "most_connections"]

logger: Final = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16_384
OTHER_FILES: Final = 256
"""Files that a process has open besides its connections: the database's, above all."""
AT_ONCE: Final = 256
"""How many connections are taken in before something else has its turn."""
PAUSE_SECONDS: Final = 0.1
"""How long none is taken in when the system has no room for another."""

_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 54\r\n\r\n{"detail":"Too many connections are open; try again"}\n'
)


def most_connections() -> int:
    """How many connections a process can have, once it is allowed as many files as it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, soft - OTHER_FILES))


class Acceptor:
    """Accepts connections of a listening socket, from when it is made until it is closed.

    The event loop's own server takes in one connection in each of its turns, which are long where there is much to do:
    whoever connects would then wait for seconds before anybody looks at what they ask.

    Args:
        listening: the socket, which stays its owner's.
        protocol: makes what serves a connection.
        open_connections: those that there are.
        most: how many there may be; others are refused with 503.
    """

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], open_connections: Sized, most: int
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._open = open_connections
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept none any more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Return when nothing is under way."""
        if self._starting:
            await asyncio.wait(self._starting)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.warning("no connection can be taken in for now: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            if len(self._open) + len(self._starting) >= self._most:
                with connection, suppress(OSError):
                    connection.send(_REFUSAL)
                continue
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    async def _start(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it is gone already
            connection.close()
