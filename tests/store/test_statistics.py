"""A server lets PostgreSQL look at tables that have grown, before autovacuum would."""

import asyncio
import uuid

import asyncpg
import pytest
from sqlalchemy import text

from lightning_sql.records import EnqueueRolloutRequest
from lightning_sql.store.factory import open_store, prepare_database
from lightning_sql.store.sql_store import SqlStore

pytestmark = pytest.mark.slow


async def prepare_alone(url: str) -> None:
    """A database whose tables nobody else looks at: on a busy machine autovacuum might come first."""
    await prepare_database(url)
    session = await asyncpg.connect(url)
    await session.execute("ALTER TABLE rollouts SET (autovacuum_enabled = false)")
    await session.close()


async def test_a_table_that_has_grown_is_analyzed_once(postgres_url: str) -> None:
    await prepare_alone(postgres_url)
    async with await open_store(postgres_url, partition=uuid.uuid4().hex) as store:
        assert isinstance(store, SqlStore)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(500)])
        # A connection tells PostgreSQL what it changed about once a second, when it does something.
        grown: list[str] = []
        async with asyncio.timeout(60):
            while not grown:
                await store.enqueue_rollout(None)
                grown += await store._lanes.refresh_statistics()
                await asyncio.sleep(0.2)
        assert grown == ["rollouts"]
        assert await store._lanes.refresh_statistics() == []
        await store.maintain()


async def test_in_process_calls_see_to_it(postgres_url: str) -> None:
    await prepare_alone(postgres_url)
    partition = uuid.uuid4().hex
    async with await open_store(postgres_url, partition=partition, scan_debounce_seconds=0.1) as store:
        assert isinstance(store, SqlStore)
        analyzed = text("SELECT analyze_count FROM pg_stat_user_tables WHERE relname = 'rollouts'")
        [[before]] = await store._lanes.fetch(analyzed)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(5000)])
        async with asyncio.timeout(60):
            while (await store._lanes.fetch(analyzed))[0][0] == before:
                await store.enqueue_rollout(None)
                await asyncio.sleep(0.2)


async def test_sqlite_needs_no_statistics(sqlite_url: str) -> None:
    async with await open_store(sqlite_url) as store:
        assert isinstance(store, SqlStore)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(500)])
        assert list(await store._lanes.refresh_statistics()) == []
