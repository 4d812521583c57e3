"""Sending answers that are large: compressed, or in parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from litestar.types import Send

from lightning_api.compression import Coding
from lightning_api.replies import Reply, Stream

__all__ = ["send_large", "send_stream"]

logger: Final = logging.getLogger(__name__)


async def send_large(reply: Reply, send: Send, coding: Coding) -> None:
    """Send an answer that is worth compressing, if the caller takes that; return when it has left, or nearly."""
    if not any(name == b"content-encoding" for name, _ in reply.headers):
        body = reply.body
        if coding.compressor is not None:
            body = await coding.compressor.add(body) + coding.compressor.end()
        reply = Reply(reply.status, body, (*reply.headers, *coding.headers))
    await reply.send(send, wait=True)


async def send_stream(stream: Stream, send: Send, coding: Coding, hangup: Callable[[], Awaitable[None]]) -> None:
    """Send an answer part by part, until the client hangs up.

    When a part cannot be had, the connection is cut: there is no other way left to say that the answer
    is not complete.

    Args:
        stream: the answer; its parts are closed in any case.
        send: takes a part once the one before it has left for the client, or nearly.
        coding: how the body is encoded.
        hangup: returns when the client is gone.
    """
    gone = asyncio.ensure_future(hangup())
    compressor = coding.compressor
    headers = [*stream.headers, *coding.headers]
    try:
        await send({"type": "http.response.start", "status": stream.status, "headers": headers})
        async for part in stream.parts:
            sent = part if compressor is None else await compressor.add(part)
            if sent:
                await send({"type": "http.response.body", "body": sent, "more_body": True})
            if gone.done():
                return
        end = b"" if compressor is None else compressor.end()
        await send({"type": "http.response.body", "body": end, "more_body": False})
    except Exception:
        # Servers cut the connection of an application that returns before it is done.
        logger.exception("an answer was cut short")
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await stream.close()
