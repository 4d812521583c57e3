"""Which answers are sent compressed, and how."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from litestar.types import HTTPScope

from lightning_api.replies import Headers
from lightning_api.settings import Settings, is_loopback

__all__ = ["COMPRESS_BYTES", "Coding", "CompressionPolicy", "Compressor", "gzip_allowed"]

COMPRESS_BYTES: Final = 32 * 1024
"""Smaller answers are sent as they are: there is little to gain."""

_LEVEL: Final = 1
"""Three times as fast as the usual level 6, and records compress nearly as well."""
_INLINE_BYTES: Final = 64 * 1024
"""So much is compressed at once in the event loop, which takes less than a millisecond; more in a thread."""
_GZIP_FORMAT: Final = zlib.MAX_WBITS | 16

_VARY: Final = (b"vary", b"Accept-Encoding")
_GZIPPED: Final = (b"content-encoding", b"gzip")


class CompressionPolicy:
    """Whether answers may be compressed: `on`, `off`, or `auto`, which leaves out callers on this machine.

    Compressing costs more time than sending, unless there is a network in between.
    """

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.compress

    def coding(self, scope: HTTPScope) -> Coding:
        """How a large answer to a request is sent."""
        if self._mode == "off":
            return Coding((), None)
        if self._compresses(scope):
            return Coding((_GZIPPED, _VARY), Compressor())
        return Coding((_VARY,), None)

    def _compresses(self, scope: HTTPScope) -> bool:
        if self._mode == "auto" and _is_local(scope):
            return False
        return any(name == b"accept-encoding" and gzip_allowed(value) for name, value in scope["headers"])


def _is_local(scope: HTTPScope) -> bool:
    client, server = scope["client"], scope["server"]
    if client is None or not client[0]:
        return True  # the other end of a UNIX socket
    return (server is not None and client[0] == server[0]) or _loopback(client[0])


@lru_cache(maxsize=1024)
def _loopback(host: str) -> bool:
    return is_loopback(host)


@lru_cache(maxsize=256)
def gzip_allowed(accept_encoding: bytes) -> bool:
    """Whether an `Accept-Encoding` header allows gzip, and does not like an uncompressed answer better."""
    weights: dict[bytes, float] = {}
    for entry in accept_encoding.lower().split(b","):
        coding, _, parameters = entry.partition(b";")
        weights[coding.strip()] = _weight(parameters.split(b";"))
    gzip = max((weights[name] for name in (b"gzip", b"x-gzip") if name in weights), default=weights.get(b"*", 0.0))
    return gzip > 0 and gzip >= weights.get(b"identity", 0.0)


def _weight(parameters: Iterable[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


class Compressor:
    """Makes a gzip file of parts, without holding up the event loop."""

    def __init__(self) -> None:
        self._gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)

    async def add(self, part: bytes) -> bytes:
        """The next bytes of the file; there may be none yet."""
        if len(part) <= _INLINE_BYTES:
            return self._gzip.compress(part)
        # Other threads go on while zlib works.
        return await asyncio.get_running_loop().run_in_executor(None, self._gzip.compress, part)

    def end(self) -> bytes:
        """The last bytes of the file."""
        return self._gzip.flush()


class Coding(NamedTuple):
    """How an answer is sent."""

    headers: Headers
    """What its headers say of that."""
    compressor: Compressor | None
    """What makes the body; None leaves it as it is."""
