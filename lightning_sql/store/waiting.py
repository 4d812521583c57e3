"""Waiting for rollouts to finish: one watcher serves every waiter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from lightning_sql.errors import LightningError

__all__ = ["FinishWatcher"]

logger: Final = logging.getLogger(__name__)


class FinishWatcher:
    """Wakes whoever waits for rollouts.

    What finishes through this store is announced to it; what finishes elsewhere (another process on
    the same database) it finds by asking `find_finished` every `poll_seconds`, once for all waiters,
    and only while somebody waits.
    """

    def __init__(
        self, find_finished: Callable[[Collection[str]], Awaitable[Iterable[str]]], poll_seconds: float
    ) -> None:
        self._find_finished = find_finished
        self._poll_seconds = poll_seconds
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    async def wait(self, rollout_ids: AbstractSet[str], timeout: float | None) -> None:
        """Return when all these rollouts are finished, after `timeout` seconds, or at close."""
        pending = {rollout_id: self._register(rollout_id) for rollout_id in rollout_ids}
        try:
            if not self._closed:
                await asyncio.wait(pending.values(), timeout=timeout)
        finally:
            for rollout_id, future in pending.items():
                future.cancel()
                self._forget(rollout_id, future)
            if not self._waiters:
                await self._stop_polling()

    def announce(self, rollout_ids: Iterable[str]) -> None:
        """Say that rollouts are finished."""
        for rollout_id in rollout_ids:
            for future in self._waiters.get(rollout_id, ()):
                if not future.done():
                    future.set_result(None)

    async def close(self) -> None:
        """Let every waiter go, now and from now on."""
        self._closed = True
        self.announce(list(self._waiters))
        await self._stop_polling()

    def _register(self, rollout_id: str) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(rollout_id, set()).add(future)
        if self._poller is None and not self._closed:
            self._poller = asyncio.create_task(self._poll(), name="lightning-sql finish watcher")
        return future

    def _forget(self, rollout_id: str, future: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(rollout_id)
        if waiters is not None:
            waiters.discard(future)
            if not waiters:
                del self._waiters[rollout_id]

    async def _stop_polling(self) -> None:
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.cancel()
            await asyncio.wait([poller])

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                self.announce(await self._find_finished(list(self._waiters)))
            except LightningError as error:
                logger.warning("looking for finished rollouts failed and will be tried again: %s", error)
