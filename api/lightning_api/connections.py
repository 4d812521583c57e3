"""A client's connection, and what it may cost: how large a head is, and how long nothing may happen.

The parser is strict about where a request ends, but takes a head of any size, and waits for ever. Nothing
here costs a request more than a few comparisons: silent connections are looked for now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final, cast

from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from lightning_api.errors import failure
from lightning_api.replies import Reply

__all__ = [
    "BODY_SECONDS",
    "HEAD_BYTES",
    "HEAD_SECONDS",
    "IDLE_SECONDS",
    "SWEEP_SECONDS",
    "TAKE_SECONDS",
    "Connection",
    "end_silent",
]

HEAD_BYTES: Final = 64 * 1024
"""Largest head of a request: its address, with the query, and its headers."""
HEAD_SECONDS: Final = 30.0
"""How long a head may take to arrive, from its first byte or, on a new connection, from its beginning."""
BODY_SECONDS: Final = 60.0
"""How long a request may stop in the middle of its body."""
TAKE_SECONDS: Final = 60.0
"""How long a client may take nothing of an answer."""
IDLE_SECONDS: Final = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that none is closed under a request."""
SWEEP_SECONDS: Final = 5.0
"""How often silent connections are looked for."""

_READ_BYTES: Final = 256 * 1024
"""No event loop reads more at once, so a head that is not complete can be found out that much later."""


async def _refuse_head(_scope: Any, _receive: Any, send: Any) -> None:
    await _closing(431, "The head of the request is too large").send(send)


def _closing(status: int, reason: str) -> Reply:
    return failure("", status, reason, ((b"connection", b"close"),))


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read = 0
        """How many bytes the last read had."""
        self._unused = 0
        """About how many bytes came since the head began, or since the last part of the body."""
        self._in_head = False
        self._in_message = False
        self._heard = 0.0
        """When something came, or it was us who did not listen; by the event loop's clock."""
        self._begun = 0.0
        """When the connection or the head that is awaited began."""
        self._answered_at: float | None = None
        """When it was seen that the answer was complete and the body was not."""
        self._untaken = 0
        self._taken_at = 0.0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._begun = self._heard = self._taken_at = self.loop.time()

    @override
    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._heard = self.loop.time()
        self._read = len(data)
        self._unused += self._read
        super().data_received(data)
        # Neither heads nor what may stand between the parts of a body and behind it is kept without end.
        if self._in_message and self._unused > HEAD_BYTES + _READ_BYTES and not self.transport.is_closing():
            self._end(431, "The head of the request is too large")

    @override
    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._begun = self._heard
        self._unused = self._read
        self._answered_at = None

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; what stands behind a body is none, although the parser says so."""
        if self._in_head:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head = False
        # One that came in few bytes need not be measured.
        if self._unused <= HEAD_BYTES or _size(self.url, self.headers) <= HEAD_BYTES:
            super().on_headers_complete()
            return
        app = self.app
        self.app = cast(Any, _refuse_head)
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    @override
    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unused = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        """The request is complete."""
        self._in_message = False
        super().on_message_complete()

    def end_if_silent(self, now: float) -> None:
        """End the connection if its client has been silent for too long."""
        cycle = self._latest
        if self._takes_nothing(now):
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._in_head or cycle is None:
            if now - self._begun > HEAD_SECONDS:
                self._end(408, "The head of the request did not arrive")
        elif self.flow.read_paused:
            self._heard = now
        elif self._in_message:
            # What comes after the answer is read and dropped, so that the client reads its answer; but not for ever.
            self._answered_at = (self._answered_at or now) if cycle.response_complete else None
            if now - (self._answered_at or self._heard) > BODY_SECONDS:
                self._end(408, "The body of the request did not arrive")
        elif cycle.response_complete and self.timeout_keep_alive_task is None and now - self._heard > IDLE_SECONDS:
            # Line ends between requests stop the timer that there is for this.
            self.transport.close()

    @property
    def _latest(self) -> RequestResponseCycle | None:
        """The request whose head came last; None before the first one."""
        return cast("RequestResponseCycle | None", self.cycle)

    def _takes_nothing(self, now: float) -> bool:
        untaken = self.transport.get_write_buffer_size()
        if untaken < self._untaken or not untaken:
            self._taken_at = now
        self._untaken = untaken
        return now - self._taken_at > TAKE_SECONDS

    def _end(self, status: int, reason: str) -> None:
        """Answer the request that is not complete, unless that would come out of turn, and close the connection."""
        cycle = self._latest
        if self._in_head:
            in_turn = cycle is None or cycle.response_complete
        else:
            in_turn = cycle is None or not (cycle.response_started or self.pipeline)
        if in_turn:
            reply = _closing(status, reason)
            lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
            lines += [b"%b: %b" % header for header in (*reply.headers, (b"content-length", b"%d" % len(reply.body)))]
            self.transport.write(b"\r\n".join([*lines, b"", reply.body]))
        self.transport.close()


def _size(url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) for name, value in headers)


def end_silent(connections: Iterable[Any], now: float) -> None:
    """End those of a server's connections whose clients have been silent for too long."""
    for connection in list(connections):
        if isinstance(connection, Connection):
            connection.end_if_silent(now)
