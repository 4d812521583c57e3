"""When to look for attempts that are over their limits (CONTRACT.md section 7.8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from lightning_sql.errors import LightningError

__all__ = ["ScanGate"]

logger: Final = logging.getLogger(__name__)

SCAN_SECONDS: Final = 5.0
"""How long calls wait for a scan: what is wrong with it is for those to find out who ask for something themselves."""


class ScanGate:
    """Lets at most one scan through per `debounce_seconds`, however many callers ask at once.

    `clock` gives seconds of any origin. With a debounce of 0 every caller gets a scan of its own,
    begun after it asked; otherwise callers that come during a scan wait for it and go on.
    """

    def __init__(
        self, scan: Callable[[], Awaitable[object]], debounce_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._scan = scan
        self._debounce_seconds = debounce_seconds
        self._clock = clock
        self._last: float | None = None
        self._lock = asyncio.Lock()

    @property
    def due(self) -> bool:
        """Whether the last scan is long enough ago."""
        return self._last is None or self._clock() - self._last >= self._debounce_seconds

    async def settle(self) -> None:
        """Return when those who are at the gate are through."""
        async with self._lock:
            pass

    async def pass_through(self) -> None:
        """Scan if it is time. A scan that fails is logged: it must not fail the call that happened to trigger it."""
        if not self.due:
            return
        async with self._lock:
            if not self.due:
                return
            begun = self._clock()
            try:
                async with asyncio.timeout(SCAN_SECONDS):
                    await self._scan()
            except LightningError as error:
                logger.warning("the watchdog's scan failed; the next one is due as usual: %s", error)
            except TimeoutError:
                logger.warning("the watchdog's scan takes long; the calls that triggered it go on without it")
            self._last = begun
