"""Waiting for a database that is away: how long, how often it is asked, and by whom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.errors import DatabaseUnavailableError, OverloadedError, TransactionConflictError

__all__ = ["WAIT_SECONDS", "Recovery", "pause_of"]

WAIT_SECONDS: Final = 40.0
"""How long a call waits for a database that is away: longer than it takes to be restarted in 30 seconds."""
FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.5
PROBE_SECONDS: Final = 10.0
MOST_WAITING: Final = 10_000
"""How many calls may wait for the database, beside those that wait in the queues of the store."""


def pause_of(tries: int) -> float:
    """How long to wait before another try, so that those that failed together do not try again together."""
    return random.uniform(0.0, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(tries, 10)))


class Recovery:
    """For one event loop: lets calls wait until a database answers again. One of them asks it, for all.

    Args:
        probe: asks the database something small; raises while it is away.
        seconds: how long a call waits for it in all.
        returns: whether an error may be over by itself, as when a server is restarted.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[object]],
        seconds: float,
        returns: Callable[[DatabaseUnavailableError], bool],
    ) -> None:
        self.seconds = seconds
        self._probe = probe
        self._returns = returns
        self._waiting: set[asyncio.Future[None]] = set()
        self._prober: asyncio.Task[None] | None = None
        self._closed = False

    def worthwhile(self, error: Exception) -> bool:
        """Whether a call that failed so has changed nothing, and may succeed when the database is back."""
        if self._closed or not isinstance(error, DatabaseUnavailableError):
            return False
        # Of the first, nobody knows whether it took place; the others have deadlines and limits of their own.
        if isinstance(error, CommitUnknownError | TransactionConflictError | OverloadedError):
            return False
        return self._returns(error)

    async def back(self, tries: int, deadline: float) -> bool:
        """Wait until it is worth while to try again, after so many tries in vain.

        False when that is not before the deadline, by the event loop's clock, or when nobody waits any more.

        Raises:
            OverloadedError: too many wait already.
        """
        loop = asyncio.get_running_loop()
        if self._closed or loop.time() >= deadline:
            return False
        if len(self._waiting) >= MOST_WAITING:
            raise OverloadedError(f"{len(self._waiting)} calls wait for the database already; try again later")
        if tries and not await self._answers(deadline):
            return False
        pause = pause_of(tries)
        if loop.time() + pause > deadline:
            return False
        await asyncio.sleep(pause)
        return not self._closed

    async def _answers(self, deadline: float) -> bool:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        if self._prober is None:
            self._prober = asyncio.create_task(self._ask(), name="lightning-sql recovery", context=Context())
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return not self._closed

    async def _ask(self) -> None:
        tries = 0
        try:
            while self._waiting and not self._closed:
                try:
                    async with asyncio.timeout(PROBE_SECONDS):
                        await self._probe()
                except (DatabaseUnavailableError, TimeoutError):
                    tries += 1
                    await asyncio.sleep(pause_of(tries))
                except Exception:  # noqa: BLE001 - whatever else is wrong, those who wait find out by themselves
                    break
                else:
                    break
        finally:
            self._prober = None
            self._let_go()

    def _let_go(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
        if self._prober is not None:
            self._prober.cancel()
        self._let_go()
