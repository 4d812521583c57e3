"""A TCP proxy on the loopback whose connections can be broken in the ways that networks do."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

__all__ = ["Proxy", "proxy_to"]


class _Link:
    """One connection through the proxy: what came from the client, and what it was connected to."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.silent = False
        """Whether what the server says is swallowed."""


class Proxy:
    """Made by `proxy_to`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._links: set[_Link] = set()
        self.port = 0

    def drop(self, share: float = 1.0) -> int:
        """Reset so large a share of the connections; how many those are."""
        chosen = self._chosen(share)
        for link in chosen:
            for side in (link.client, link.server):
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

    def _chosen(self, share: float) -> list[_Link]:
        links = [link for link in self._links if not link.silent]
        return random.sample(links, round(len(links) * share))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(writer, to_server)
        self._links.add(link)
        try:
            ways = [
                asyncio.ensure_future(self._copy(reader, to_server, None)),
                asyncio.ensure_future(self._copy(from_server, writer, link)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._links.discard(link)
            for side in (writer, to_server):
                side.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link | None) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if link is None or not link.silent:
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
