"""Transactions end one way or the other, whatever happens to the caller, the connection or the server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from lightning_sql.collections.sql import SqlCollections
from lightning_sql.database.engine import CommitUnknownError, Database
from lightning_sql.errors import DatabaseUnavailableError, TransactionConflictError, UnstorableValueError
from lightning_sql.store.factory import open_store, prepare_database
from lightning_sql.testing.postgres import PostgresCluster


@pytest.fixture(params=["sqlite", "postgres"])
async def collections(request: pytest.FixtureRequest) -> AsyncIterator[SqlCollections]:
    url: str = request.getfixturevalue(f"{request.param}_url")
    await prepare_database(url)
    collections = SqlCollections(Database(url))
    yield collections
    await collections.close()


async def test_a_call_whose_caller_is_cancelled_runs_to_its_end(collections: SqlCollections) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(inside: SqlCollections) -> None:
        await inside.rollout_queue.enqueue(["a"])
        entered.set()
        await leave.wait()
        await inside.rollout_queue.enqueue(["b"])

    call = asyncio.create_task(collections.execute(slow, commit=True))
    await entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    leave.set()
    await collections.close()  # waits for it
    assert await collections.rollout_queue.peek(2) == ["a", "b"]


async def test_a_cancelled_transaction_is_rolled_back_and_its_connection_comes_back(
    collections: SqlCollections,
) -> None:
    for number in range(40):  # more than any pool holds
        entered = asyncio.Event()

        async def stay(entered: asyncio.Event = entered, number: int = number) -> None:
            async with collections.atomic() as inside:
                await inside.rollout_queue.enqueue([str(number)])
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(stay())
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
    assert await collections.rollout_queue.size() == 0
    await collections.rollout_queue.enqueue(["after"])


async def test_closing_waits_for_what_was_sent(collections: SqlCollections) -> None:
    entered = asyncio.Event()

    async def slow(inside: SqlCollections) -> None:
        entered.set()
        await asyncio.sleep(0.05)
        await inside.rollout_queue.enqueue(["a"])

    call = asyncio.create_task(collections.execute(slow, commit=True))
    await entered.wait()
    await collections.close()
    await call
    assert await collections.rollout_queue.size() == 1


async def test_a_conflict_is_tried_again_only_with_commit(collections: SqlCollections) -> None:
    tries: list[int] = []

    async def lose_twice(inside: SqlCollections) -> str:
        tries.append(1)
        await inside.rollout_queue.enqueue(["x"])
        if len(tries) < 3:
            raise TransactionConflictError
        return "done"

    assert await collections.execute(lose_twice, commit=True) == "done"
    assert len(tries) == 3
    assert await collections.rollout_queue.size() == 1
    tries.clear()
    with pytest.raises(TransactionConflictError):
        await collections.execute(lose_twice)
    assert len(tries) == 1
    assert await collections.rollout_queue.size() == 1


async def test_an_unknown_commit_is_never_run_again(
    collections: SqlCollections, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Database, commit: Any, writing: bool) -> None:
        await commit
        raise CommitUnknownError

    tries: list[int] = []

    async def enqueue(inside: SqlCollections) -> None:
        tries.append(1)
        await inside.rollout_queue.enqueue(["x"])

    monkeypatch.setattr(Database, "_commit", broken)
    with pytest.raises(CommitUnknownError):
        await collections.execute(enqueue, commit=True)
    assert len(tries) == 1
    monkeypatch.undo()
    assert await collections.rollout_queue.size() == 1


async def test_values_that_do_not_fit_are_refused_before_they_reach_the_driver(collections: SqlCollections) -> None:
    with pytest.raises(UnstorableValueError):
        await collections.span_sequence_ids.inc("a", 2**63)
    assert await collections.span_sequence_ids.inc("a", 2**63 - 1) == 2**63 - 1
    with pytest.raises(UnstorableValueError):
        await collections.span_sequence_ids.inc("a", 1)
    assert await collections.span_sequence_ids.get("a") == 2**63 - 1


async def backends(connection: AsyncConnection) -> int:
    kill = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    return (await connection.execute(text(kill))).scalar_one()


async def test_terminated_sessions_cost_no_call(postgres_url: str) -> None:
    async with await open_store(postgres_url) as store:
        await asyncio.gather(*(store.enqueue_rollout(number) for number in range(20)))
        other = Database(postgres_url)
        async with other.transaction(writing=True) as connection:
            assert await backends(connection) > 0
        claimed = await asyncio.gather(*(store.dequeue_rollout() for _ in range(20)))
        assert len({rollout.rollout_id for rollout in claimed if rollout}) == 20
        await other.close()


@pytest.mark.slow
async def test_a_killed_server_is_an_error_and_a_restarted_one_is_used_again(postgres_cluster: PostgresCluster) -> None:
    url = postgres_cluster.create_database()
    async with await open_store(url, database_wait_seconds=1) as store:
        kept = await store.enqueue_rollout({"kept": True})
        postgres_cluster.kill()
        with pytest.raises(DatabaseUnavailableError) as caught:
            await store.enqueue_rollout({"lost": True})
        assert "postgres" not in str(caught.value).lower()
        postgres_cluster.start()
        claimed = await store.dequeue_rollout()
        assert claimed is not None
        assert claimed.rollout_id == kept.rollout_id
        assert await store.dequeue_rollout() is None


@pytest.mark.slow
async def test_threads_with_event_loops_of_their_own_share_an_sqlite_file(sqlite_url: str) -> None:
    await prepare_database(sqlite_url)
    database = Database(sqlite_url)

    def work(number: int) -> None:
        async def enqueue() -> None:
            collections = SqlCollections(database)
            for turn in range(25):
                await collections.rollout_queue.enqueue([f"{number}-{turn}"])
            await collections.close()

        asyncio.run(enqueue())

    await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(4)))
    collections = SqlCollections(database)
    queued = await collections.rollout_queue.peek(1000)
    assert sorted(queued) == sorted(f"{number}-{turn}" for number in range(4) for turn in range(25))
    assert [entry for entry in queued if entry.startswith("1-")] == [f"1-{turn}" for turn in range(25)]
    await collections.close()
