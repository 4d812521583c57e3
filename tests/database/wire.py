"""A proxy in front of PostgreSQL that notes what is asked: how often somebody waits for an answer, and for what."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["Wire", "through_proxy"]


@dataclass
class Wire:
    """What went over all connections since `clear`."""

    url: str = ""
    trips: int = 0
    """How often a client waited: after a simple query, or a Sync at the end of an extended one."""
    texts: list[str] = field(default_factory=list[str])
    """The statements that were sent as text, in order; a prepared one is, once for each connection."""
    connections: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def clear(self) -> None:
        self.trips = 0
        self.texts.clear()

    async def cut(self) -> None:
        """Break every connection without a word, to either side."""
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    def note(self, kind: bytes, body: bytes) -> None:
        if kind in (b"Q", b"S"):
            self.trips += 1
        if kind == b"Q":
            self.texts.append(body.rstrip(b"\0").decode())
        elif kind == b"P":  # the name of the statement, and its text
            self.texts.append(body.split(b"\0", 2)[1].decode())


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _forward_and_note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire) -> None:
    # The first message has no kind.
    size = await reader.readexactly(4)
    writer.write(size + await reader.readexactly(int.from_bytes(size) - 4))
    while True:
        head = await reader.readexactly(5)
        body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
        wire.note(head[:1], body)
        writer.write(head + body)
        await writer.drain()


@asynccontextmanager
async def through_proxy(database_url: str) -> AsyncIterator[Wire]:
    """The way to a database past somebody who takes notes; `url` is its URL by that way."""
    parts = urlsplit(database_url)
    wire = Wire()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        ways = [
            asyncio.ensure_future(_forward_and_note(reader, back, wire)),
            asyncio.ensure_future(_forward(there, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, back):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        wire.connections.add(task)
        task.add_done_callback(wire.connections.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    credentials = parts.netloc.rpartition("@")[0]
    # Encrypted, there would be nothing to note.
    netloc = f"{credentials}@127.0.0.1:{port}" if credentials else f"127.0.0.1:{port}"
    wire.url = parts._replace(netloc=netloc, query="ssl=disable").geturl()
    try:
        yield wire
    finally:
        server.close()
        await wire.cut()
        await server.wait_closed()
