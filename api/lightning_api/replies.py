"""An answer, ready to be sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from litestar.types import Send

from lightning_api.payloads import encode_json

__all__ = ["JSON_HEADERS", "Headers", "Reply", "Stream"]

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

JSON_HEADERS: Final[Headers] = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class Reply:
    """A status, headers in lower case without `content-length`, and a whole body."""

    status: int
    body: bytes = b""
    headers: Headers = ()

    @classmethod
    def json(cls, status: int, content: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """An answer in JSON."""
        if not headers:
            return cls(status, encode_json(content), JSON_HEADERS)
        more = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
        return cls(status, encode_json(content), (*JSON_HEADERS, *more))

    async def send(self, send: Send, *, wait: bool = False) -> None:
        """Send it, and perhaps wait until it has left for the client, or nearly."""
        length = (b"content-length", b"%d" % len(self.body))
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body, "more_body": wait})
        if wait:
            # A server holds this up until there is room for more.
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(slots=True)
class Stream:
    """A status, headers in lower case, and a body in parts, each ready when the one before it is on its way."""

    status: int
    parts: AsyncIterator[bytes]
    headers: Headers = JSON_HEADERS

    async def close(self) -> None:
        """Let what reads the parts end; they need not have been read."""
        close = getattr(self.parts, "aclose", None)
        if close is not None:
            await close()
