"""An answer, ready to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from litestar.types import Send

from lightning_api.payloads import encode_json

__all__ = ["Reply"]

_JSON: Final = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Reply:
    """A status, headers in lower case without `content-length`, and a whole body."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def json(cls, status: int, content: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """An answer in JSON."""
        if not headers:
            return cls(status, encode_json(content), (_JSON,))
        more = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
        return cls(status, encode_json(content), (_JSON, *more))

    async def send(self, send: Send) -> None:
        """Send it."""
        length = (b"content-length", b"%d" % len(self.body))
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})
