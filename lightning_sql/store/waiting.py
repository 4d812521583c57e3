"""Waiting for rollouts to finish, or to be queued: one watcher serves every waiter."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

from lightning_sql.errors import LightningError

__all__ = ["QUEUE_POLL_SECONDS", "FinishWatcher", "QueueWatcher"]

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)

_LONGEST_SECONDS: Final = 365 * 86400.0
"""An event loop cannot time anything much longer."""
QUEUE_POLL_SECONDS: Final = 0.02
"""How often the queue is looked into while somebody waits for it: a claim is to be made within 50 ms."""


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
                most = None if timeout is None else min(timeout, _LONGEST_SECONDS)
                await asyncio.wait(pending.values(), timeout=most)
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


class QueueWatcher:
    """Lets callers whose claims found nothing try again when there is something, those first who came first.

    What is queued through this store is announced to it; what is queued elsewhere, or again, it finds by asking
    `count_queued` every `poll_seconds`, once for all waiters, and only while somebody waits.

    Args:
        count_queued: how many rollouts are in the queue, counted up to a number.
        poll_seconds: how long something may be in the queue before it is found.
    """

    def __init__(self, count_queued: Callable[[int], Awaitable[int]], poll_seconds: float) -> None:
        self._count_queued = count_queued
        self._poll_seconds = poll_seconds
        self._tickets = itertools.count()
        self._line: list[tuple[int, asyncio.Future[bool]]] = []
        """A heap; those that have gone are in it until they come to its front."""
        self._waiting = 0
        self._claiming = 0
        """How many of those who waited are trying now."""
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    async def claim(self, attempt: Callable[[], Awaitable[Sequence[T]]], seconds: float) -> Sequence[T]:
        """What an attempt gives: the first that gives something, or the last before the time is up or at close."""
        claimed = await attempt()
        deadline = asyncio.get_running_loop().time() + min(seconds, _LONGEST_SECONDS)
        ticket = next(self._tickets)
        while not claimed and await self._turn(ticket, deadline):
            self._claiming += 1
            try:
                claimed = await attempt()
            finally:
                self._claiming -= 1
        return claimed

    def announce(self, count: int) -> None:
        """Say that so many rollouts have been queued."""
        while count > 0 and self._line:
            _, turn = heapq.heappop(self._line)
            if not turn.done():
                turn.set_result(True)
                count -= 1

    async def close(self) -> None:
        """Let every waiter go, now and from now on."""
        self._closed = True
        for _, turn in self._line:
            if not turn.done():
                turn.set_result(False)
        self._line.clear()
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.cancel()
            await asyncio.wait([poller])

    async def _turn(self, ticket: int, deadline: float) -> bool:
        """Wait in line; whether to try now, or to give up."""
        loop = asyncio.get_running_loop()
        if self._closed or loop.time() >= deadline:
            return False
        turn: asyncio.Future[bool] = loop.create_future()
        heapq.heappush(self._line, (ticket, turn))
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="lightning-sql queue watcher")
        self._waiting += 1
        try:
            # Whoever is told and gone in the same moment has told nobody else; the next poll does.
            async with asyncio.timeout_at(deadline):
                return await turn
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1

    async def _poll(self) -> None:
        failures = 0
        while self._waiting:
            await asyncio.sleep(self._poll_seconds)
            try:
                queued = await self._count_queued(self._waiting + self._claiming)
                failures = 0
            except LightningError as error:
                if not failures:
                    logger.warning("looking into the queue failed and will be tried again: %s", error)
                failures += 1
                continue
            # Those who are trying take theirs.
            self.announce(queued - self._claiming)
        self._poller = None
