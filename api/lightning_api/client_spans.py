"""Spans of a client that go to the service together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from lightning_sql.errors import LightningError
from lightning_sql.records import Span

__all__ = ["MOST_TOGETHER", "SpanBatches"]

MOST_TOGETHER: Final = 500
"""How many spans one request takes at most."""

_Outcome: TypeAlias = Span | LightningError | None


class SpanBatches:
    """The spans of one event loop: those that come while others are on their way go in the next request.

    Of two spans of one attempt the first to come is the first to go.

    Args:
        send: sends spans; what came of each, or the error that it is refused with.
    """

    def __init__(self, send: Callable[[Sequence[Span]], Awaitable[Sequence[_Outcome]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Span, asyncio.Future[Span | None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def add(self, span: Span) -> Span | None:
        """Have a span stored; None if it was before.

        Raises:
            LightningError: as `LightningStore.add_span` does.
        """
        future: asyncio.Future[Span | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((span, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="lightning-sql spans")
        return await future

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
                await self._send_some(batch)
        finally:
            self._sending = None

    async def _send_some(self, batch: Sequence[tuple[Span, asyncio.Future[Span | None]]]) -> None:
        outcomes: Sequence[_Outcome | BaseException]
        try:
            outcomes = await self._send([span for span, _ in batch])
        except Exception as error:  # noqa: BLE001 - it is their callers' error
            outcomes = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # whoever waited for it is gone
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
