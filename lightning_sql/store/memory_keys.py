"""Idempotency keys of a store that keeps them in the process: they last as long as the store object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from lightning_sql.errors import IdempotencyKeyReusedError
from lightning_sql.records import IdempotencyKey
from lightning_sql.store.interface import KEPT_SECONDS, check_key

__all__ = ["MemoryKeys"]

R = TypeVar("R")


class _Done(NamedTuple):
    route: str
    fingerprint: str
    ids: Any
    time: float


class MemoryKeys:
    """What calls that may be repeated did, for one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: dict[str, _Done] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def once(
        self,
        key: IdempotencyKey | None,
        call: Callable[[], Awaitable[R]],
        ids_of: Callable[[R], Any],
        recall: Callable[[Any], Awaitable[R]],
    ) -> R:
        """Make a call, or answer it from what an earlier one of this key did.

        Args:
            key: the call's; without one the call is made each time.
            call: makes the call, all of it or nothing.
            ids_of: what to remember of its answer; nothing is, if that is empty.
            recall: makes the answer of what is remembered.

        Raises:
            IdempotencyKeyReusedError: the earlier call was another one.
        """
        if key is None:
            return await call()
        check_key(key)
        lock = self._locks.setdefault(key.key, asyncio.Lock())
        async with lock:
            done = self._done.get(key.key)
            if done is not None:
                if (done.route, done.fingerprint) != (key.route, key.fingerprint):
                    raise IdempotencyKeyReusedError
                return await recall(done.ids)
            answer = await call()
            ids = ids_of(answer)
            if ids:
                self._done[key.key] = _Done(key.route, key.fingerprint, ids, self._clock())
                self._forget_old()
            return answer

    def _forget_old(self) -> None:
        since = self._clock() - KEPT_SECONDS
        old: list[str] = []
        for key, done in self._done.items():  # the oldest come first
            if done.time >= since:
                break
            old.append(key)
        for key in old:
            del self._done[key]
