"""What the native store has for each event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from lightning_sql.errors import LightningError
from lightning_sql.store.sql_lanes import Lanes
from lightning_sql.store.waiting import FinishWatcher, QueueWatcher
from lightning_sql.store.watchdog import ScanGate

__all__ = ["OfLoop"]

logger: Final = logging.getLogger(__name__)

MAINTENANCE_SECONDS: Final = 5.0
"""Least time between two looks at the database's statistics that calls trigger."""


class OfLoop:
    """What belongs to one event loop.

    Args:
        lanes: the way to the database.
        watcher: wakes those who wait for rollouts to finish.
        queue: wakes those who wait for rollouts to be queued.
        sweep: the watchdog's scan.
        maintain: looks at the database's statistics.
        debounce_seconds: least time between two scans that calls trigger.
        clock: seconds of any origin.
    """

    def __init__(
        self,
        lanes: Lanes,
        watcher: FinishWatcher,
        queue: QueueWatcher,
        *,
        sweep: Callable[[], Awaitable[object]],
        maintain: Callable[[], Awaitable[object]],
        debounce_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.lanes = lanes
        self.watcher = watcher
        self.queue = queue
        self.gate = ScanGate(self._look_after, debounce_seconds, clock)
        self._sweep = sweep
        self._maintain = maintain
        self.closing: asyncio.Task[None] | None = None
        """What closes it, once for all who ask."""
        self._tending: asyncio.Task[None] | None = None
        self._tended = 0.0

    async def _look_after(self) -> None:
        """What calls trigger now and then, so that a store needs no background task."""
        await self._sweep()
        if self._tending is None or (self._tending.done() and time.monotonic() - self._tended >= MAINTENANCE_SECONDS):
            self._tended = time.monotonic()
            # Nobody's call waits for this: to look at a large table takes its time.
            self._tending = asyncio.create_task(self._maintain_quietly(), name="lightning-sql maintenance")

    async def _maintain_quietly(self) -> None:
        try:
            await self._maintain()
        except LightningError as error:
            logger.debug("the database's statistics could not be looked at: %s", error)

    async def release_waiters(self) -> None:
        """Let those who wait go, now and from now on."""
        await self.watcher.close()
        await self.queue.close()

    async def close(self) -> None:
        """Wait for what was begun."""
        await self.release_waiters()
        try:
            await self.gate.settle()
            if self._tending is not None:
                await asyncio.wait([self._tending])
        finally:
            await self.lanes.close()
