"""Fixtures and helpers of the native store's own tests, which run on both dialects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from lightning_sql.records import AttemptedRollout
from lightning_sql.store.sql_store import SqlStore
from tests.backends import POSTGRES, Clock, NewStore
from tests.native_laws import broken_laws

__all__ = ["PATIENCE", "OpenStore", "at_once", "dialect", "key_of", "open_store", "started", "store"]

PATIENCE = 60.0
NEVER = 1e12
"""Seconds between scans of the watchdog, so that calls at once arrive at once."""

OpenStore = Callable[..., SqlStore]


@pytest.fixture(params=["sqlite", POSTGRES])
async def dialect(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def open_store(dialect: str, new_store: NewStore, clock: Clock) -> AsyncIterator[OpenStore]:
    """Opens stores on one partition; in the end its tables must be in order."""
    opened: list[SqlStore] = []

    def open_another(**options: Any) -> SqlStore:
        options = {"partition": opened[0]._partition if opened else None, "scan_debounce_seconds": NEVER} | options
        store = new_store(dialect, **options)
        assert isinstance(store, SqlStore)
        opened.append(store)
        return store

    yield open_another
    async with asyncio.timeout(PATIENCE):
        wrong = await broken_laws(opened[0], clock.now)
        for store in opened:
            await store.close()
    assert wrong == []


@pytest.fixture
async def store(open_store: OpenStore) -> SqlStore:
    """An empty store that has had its first scan."""
    store = open_store()
    await store.ping()
    await store.query_workers()
    return store


async def at_once(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """The answers of calls that are made at the same time; errors among them."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*calls, return_exceptions=True)


async def started(store: SqlStore, count: int = 1, **options: Any) -> list[AttemptedRollout]:
    """Rollouts that are worked on."""
    return [await store.start_rollout(number, **options) for number in range(count)]


def key_of(rollout: AttemptedRollout) -> tuple[str, str]:
    """The ids of a rollout and of the attempt that it came with."""
    return rollout.rollout_id, rollout.attempt.attempt_id
