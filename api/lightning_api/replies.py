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

    async def send(self, send: Send) -> None:
        """Send it."""
        length = (b"content-length", b"%d" % len(self.body))
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@dataclass(slots=True)
class Stream:
    """A status, headers in lower case, and a body in parts, each ready when the one before it is on its way."""

    status: int
    parts: AsyncIterator[bytes]
    headers: Headers = JSON_HEADERS
