"""A TCP proxy on the loopback whose connections can be broken in the ways that networks do."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

__all__ = ["Proxy", "proxy_to"]


class _Link:
    """One connection through the proxy: what came from the client, and what it was connected to."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter | None) -> None:
        self.client = client
        self.server = server
        self.silent = False
        """Whether what the server says is swallowed."""
        self.lost = False
        """Whether nothing arrives any more, in either direction, and nobody is told."""


class Proxy:
    """Made by `proxy_to`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._links: set[_Link] = set()
        self._swallowing = False
        self.port = 0

    def drop(self, share: float = 1.0) -> int:
        """Reset so large a share of the connections; how many those are."""
        chosen = self._chosen(share)
        for link in chosen:
            for side in (link.client, link.server):
                if side is not None:
                    _reset(side)
        return len(chosen)

    def half_close(self, share: float = 1.0) -> int:
        """End the way from the server to the client, on which nothing comes any more, while the other stays open."""
        chosen = self._chosen(share)
        for link in chosen:
            link.silent = True
            with suppress(OSError, RuntimeError):
                link.client.write_eof()
        return len(chosen)

    def black_hole(self, *, new: bool) -> int:
        """Let nothing pass on any connection, while all of them stay open; how many those are.

        With `new`, connections that are made from now on are accepted and lead nowhere either, until `heal`.
        """
        for link in self._links:
            link.lost = True
        self._swallowing = new
        return len(self._links)

    def heal(self) -> None:
        """Let new connections pass again, and break those that lead nowhere."""
        self._swallowing = False
        for link in list(self._links):
            if link.lost:
                for side in (link.client, link.server):
                    if side is not None:
                        _reset(side)

    def _chosen(self, share: float) -> list[_Link]:
        links = [link for link in self._links if not (link.silent or link.lost)]
        return random.sample(links, round(len(links) * share))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if self._swallowing:
            await self._swallow(reader, writer)
            return
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(writer, to_server)
        self._links.add(link)
        try:
            ways = [
                asyncio.ensure_future(self._copy(reader, to_server, link, back=False)),
                asyncio.ensure_future(self._copy(from_server, writer, link, back=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._links.discard(link)
            for side in (writer, to_server):
                side.close()

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection that leads nowhere."""
        link = _Link(writer, None)
        link.lost = True
        self._links.add(link)
        try:
            with suppress(OSError):
                while await reader.read(65536):
                    pass
        finally:
            self._links.discard(link)
            writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link, *, back: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not link.lost and not (back and link.silent):
                    writer.write(data)
                    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            # Closed at once, with a reset instead of an end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncGenerator[Proxy]:
    """A proxy to an address, which may come and go meanwhile."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.drop()
