"""A store that is closed: what was begun is done, and it may be used again."""

import asyncio
from collections.abc import Callable

import pytest

from lightning_sql.database.engine import Database
from lightning_sql.store.sql_store import SqlStore

PATIENCE = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", ["sqlite", "postgres"])]


@pytest.fixture
def store(database_of: Callable[[str], str], backend: str, request: pytest.FixtureRequest) -> SqlStore:
    return SqlStore(Database(database_of(backend)), partition=request.node.name)


async def test_what_was_begun_is_done(store: SqlStore) -> None:
    async with asyncio.timeout(PATIENCE):
        calls = [asyncio.create_task(store.enqueue_rollout(number)) for number in range(200)]
        await asyncio.sleep(0.003)
        await store.close()
        assert len({rollout.rollout_id for rollout in await asyncio.gather(*calls)}) == 200
        assert (await store.query_rollouts(limit=1)).total == 200
        await store.close()


async def test_a_close_that_nobody_waits_for_is_a_close(store: SqlStore) -> None:
    async with asyncio.timeout(PATIENCE):
        for turns in range(12):
            await store.enqueue_rollout(turns)
            others = [asyncio.create_task(store.close()) for _ in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            others[0].cancel()
            assert await asyncio.gather(*others[1:]) == [None]
            await asyncio.wait(others)
        await store.enqueue_rollout("after")
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await store.close()
        assert (await store.query_rollouts(limit=1)).total == 13
        await store.close()
