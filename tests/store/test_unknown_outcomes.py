"""Writes whose connection breaks when nobody knows whether they took place: they take place once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from sqlalchemy.ext.asyncio import AsyncTransaction

from lightning_sql.database.dialects.hot import Claim
from lightning_sql.database.engine import CommitUnknownError, Database
from lightning_sql.records import EnqueueRolloutRequest
from lightning_sql.store.sql_store import SqlStore
from tests.database.wire import through_proxy
from tests.native_laws import broken_laws, queue_of
from tests.store.native import at_once

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_transaction_whose_connection_breaks_takes_place_once(
    database_of: Callable[[str], str], request: pytest.FixtureRequest, took_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is asked what became of it."""
    commit = AsyncTransaction.commit
    breaks = 0

    async with through_proxy(database_of("postgres")) as wire:
        database = Database(wire.url)
        async with SqlStore(database, partition=request.node.name, scan_debounce_seconds=1e12) as store:
            await store.enqueue_rollout("queued")

            async def unlucky(transaction: AsyncTransaction) -> None:
                nonlocal breaks
                connection: Any = transaction.connection.sync_connection
                if connection.get_execution_options().get("postgresql_readonly", True):
                    await commit(transaction)  # of somebody who only asks
                    return
                breaks += 1
                if breaks % 2:
                    if took_place:
                        await commit(transaction)
                    driver: Any = (await transaction.connection.get_raw_connection()).driver_connection
                    await wire.cut()
                    while not driver.is_closed():  # noqa: ASYNC110 - the driver says so to nobody
                        await asyncio.sleep(0.001)
                    raise OSError("the connection is gone")
                await commit(transaction)

            monkeypatch.setattr(AsyncTransaction, "commit", unlucky)
            started = await store.start_rollout("new", worker_id="w")
            again = await store.start_attempt(started.rollout_id, "w")
            assert again.attempt.sequence_id == 2
            resources = await store.add_resources({})
            assert (await store.update_resources(resources.resources_id, {})).version == 2
            queued = await store.update_rollout(started.rollout_id, status="queuing")
            assert queued.status == "queuing"
            assert breaks >= (5 if took_place else 10)
            assert (await store.query_rollouts()).total == 2
            assert [attempt.sequence_id for attempt in await store.query_attempts(started.rollout_id)] == [1, 2]
            assert (await store.query_resources()).total == 1
            assert len(await queue_of(store)) == 2
            assert await broken_laws(store, 4e9) == []


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("queued", [True, False])
async def test_claims_whose_connection_breaks_take_place_once(
    database_of: Callable[[str], str],
    request: pytest.FixtureRequest,
    took_place: bool,
    queued: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with through_proxy(database_of("postgres")) as wire:
        database = Database(wire.url)
        async with SqlStore(database, partition=request.node.name, scan_debounce_seconds=1e12) as store:
            if queued:
                await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(5)])
            hot = cast(Any, store._lanes.hot)
            run, breaks = hot._run, 0

            async def unlucky(statement: Any, values: Any, **options: Any) -> Any:
                nonlocal breaks
                if statement.name.startswith("claim") and breaks < 2:
                    breaks += 1
                    session: list[Any] = []
                    await hot._hot.use(lambda held: noting(held, session))
                    if took_place:
                        await run(statement, values, **options)
                    await wire.cut()
                    raise CommitUnknownError(token=session[0])
                return await run(statement, values, **options)

            async def noting(held: Any, session: list[Any]) -> None:
                session.append(held.session)

            monkeypatch.setattr(hot, "_run", unlucky)
            calls = (store.dequeue_many_rollouts(limit=2, worker_id="w"), store.dequeue_rollout("v"))
            many, one = await at_once(*calls)
            if not queued:
                assert (many, one) == ([], None)
                return
            claimed = [*many, one]
            assert sorted(rollout.input for rollout in claimed) == [0, 1, 2]
            assert [rollout.attempt.worker_id for rollout in claimed] == ["w", "w", "v"]
            for rollout in claimed:
                assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
                assert [item.attempt_id for item in await store.query_attempts(rollout.rollout_id)] == [
                    rollout.attempt.attempt_id
                ]
            assert len(await queue_of(store)) == 2
            assert await broken_laws(store, 4e9) == []


async def test_an_unknown_second_look_at_the_queue_is_not_taken_for_an_empty_queue(
    postgres_store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = cast(Any, postgres_store._lanes.hot)
    answers = [(1.0, [[("a row",)], []])]

    async def behind(_floor: int, _claims: Any, _now: Any) -> Any:
        if answers:
            return answers.pop()
        raise CommitUnknownError

    monkeypatch.setattr(hot, "_claim_behind", behind)
    monkeypatch.setattr(hot._front, "floor", lambda: 5)
    with pytest.raises(CommitUnknownError):
        await hot.claim([Claim(None, ["at-1"]), Claim(None, ["at-2"])], None)


@pytest.mark.parametrize("attempt_id", ["latest", None])
async def test_an_update_of_the_latest_attempt_is_not_sent_again(
    postgres_store: SqlStore, monkeypatch: pytest.MonkeyPatch, attempt_id: str | None
) -> None:
    """The second time, the latest one may be somebody else's."""
    started = await postgres_store.start_rollout(1)
    hot = cast(Any, postgres_store._lanes.hot)
    update, sent = hot.update_attempts, 0

    async def unlucky(changes: Any, now: Any) -> Any:
        nonlocal sent
        sent += 1
        answer = await update(changes, now)
        if sent == 1:
            session: list[Any] = []

            async def note(held: Any) -> None:
                session.append(held.session)

            await hot._hot.use(note)
            raise CommitUnknownError(token=session[0])
        return answer

    monkeypatch.setattr(hot, "update_attempts", unlucky)
    call = postgres_store.update_attempt(
        started.rollout_id, attempt_id or started.attempt.attempt_id, status="succeeded"
    )
    if attempt_id is None:
        assert (await call).status == "succeeded"
        assert sent == 2
    else:
        with pytest.raises(CommitUnknownError):
            await call
        assert sent == 1


@pytest.fixture
async def postgres_store(database_of: Callable[[str], str], request: pytest.FixtureRequest) -> AsyncIterator[SqlStore]:
    database = Database(database_of("postgres"))
    async with SqlStore(database, partition=request.node.name, scan_debounce_seconds=1e12) as store:
        await store.query_workers()
        yield store
