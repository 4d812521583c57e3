"""Spans of a client that go to the service together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from lightning_sql.errors import LightningError
from lightning_sql.records import Span

__all__ = ["MOST_TOGETHER", "SpanBatches"]

MOST_TOGETHER: Final = 500
"""How many spans one request takes at most."""

MOST_BYTES: Final = 4 * 1024 * 1024
"""About how large they are together; a larger one goes alone."""

_Outcome: TypeAlias = Span | LightningError | None


class Unsent(NamedTuple):
    """A span, and how it is sent."""

    span: Span
    body: bytes


def take_batch(unsent: list[Unsent]) -> list[Unsent]:
    """Take the spans that go in the next request, at least one, from the beginning of a list."""
    count = 1
    size = len(unsent[0].body)
    while count < min(len(unsent), MOST_TOGETHER) and (size := size + len(unsent[count].body)) <= MOST_BYTES:
        count += 1
    batch = unsent[:count]
    del unsent[:count]
    return batch


class SpanBatches:
    """The spans of one event loop: those that come while others are on their way go in the next request.

    Of two spans of one attempt the first to come is the first to go.

    Args:
        send: sends spans; what came of each, or the error that it is refused with.
    """

    def __init__(self, send: Callable[[Sequence[Unsent]], Awaitable[Sequence[_Outcome]]]) -> None:
        self._send = send
        self._waiting: list[Unsent] = []
        self._futures: list[asyncio.Future[Span | None]] = []
        """Of those that wait, in their order."""
        self._sending: asyncio.Task[None] | None = None

    async def add(self, unsent: Unsent) -> Span | None:
        """Have a span stored; None if it was before.

        Raises:
            LightningError: as `LightningStore.add_span` does.
        """
        future: asyncio.Future[Span | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(unsent)
        self._futures.append(future)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="lightning-sql spans")
        return await future

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = take_batch(self._waiting)
                futures = self._futures[: len(batch)]
                del self._futures[: len(batch)]
                await self._send_some(batch, futures)
        finally:
            self._sending = None

    async def _send_some(self, batch: Sequence[Unsent], futures: Sequence[asyncio.Future[Span | None]]) -> None:
        outcomes: Sequence[_Outcome | BaseException]
        try:
            outcomes = await self._send(batch)
        except Exception as error:  # noqa: BLE001 - it is their callers' error
            outcomes = [error] * len(batch)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue  # whoever waited for it is gone
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
