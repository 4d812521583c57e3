"""An SQLite file without room: what does not fit is undone and refused, what does is stored, and room helps."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from lightning_sql.database.engine import Database
from lightning_sql.errors import DatabaseFullError
from lightning_sql.records import EnqueueRolloutRequest
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.native_laws import broken_laws, queue_of
from tests.store.native import key_of

LARGE = "x" * 100_000
AMPLE = 1_000_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    url = f"sqlite:///{tmp_path / 'full.db'}"
    await prepare_database(url)
    async with SqlStore(Database(url)) as store:
        yield store
        assert await broken_laws(store, 0.0) == []


async def allow_pages(store: SqlStore, most: int) -> None:
    def limit(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

    await store._lanes.hot.write(limit)


async def test_what_does_not_fit_is_refused_whole_until_there_is_room(store: SqlStore) -> None:
    before = await store.enqueue_rollout("before")
    await allow_pages(store, 1)
    for _ in range(2):
        with pytest.raises(DatabaseFullError):
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=text) for text in ("small", LARGE)])
        with pytest.raises(DatabaseFullError):
            await store.start_rollout(LARGE)
    assert await queue_of(store) == [before.rollout_id]
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    with pytest.raises(DatabaseFullError):
        await store.add_span(make_span(*key_of(claimed), "s", attributes={"text": LARGE}))
    assert list(await store.query_spans(claimed.rollout_id)) == []
    await allow_pages(store, AMPLE)
    assert await store.add_span(make_span(*key_of(claimed), "s", attributes={"text": LARGE})) is not None
    assert (await store.start_rollout(LARGE)).status == "preparing"


async def test_of_calls_that_come_together_those_that_fit_are_stored(store: SqlStore) -> None:
    rollouts = [await store.start_rollout(number) for number in range(4)]
    await allow_pages(store, 1)
    # Of different kinds, so that they share a transaction but not a statement.
    answers = await asyncio.gather(
        store.enqueue_rollout(LARGE),
        *(store.update_attempt(*key_of(rollout), status="succeeded") for rollout in rollouts),
        return_exceptions=True,
    )
    assert [type(answer).__name__ for answer in answers] == ["DatabaseFullError"] + 4 * ["Attempt"]
    assert [rollout.status for rollout in await store.query_rollouts()] == ["succeeded"] * 4
    await allow_pages(store, AMPLE)
