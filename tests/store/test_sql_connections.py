"""PostgreSQL sessions that are ended under the native store: what was under way is tried again or fails whole."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import pytest

from lightning_sql.database.engine import CommitUnknownError, Database
from lightning_sql.errors import DatabaseUnavailableError, DuplicatedPrimaryKeyError
from lightning_sql.records import EnqueueRolloutRequest
from lightning_sql.store.factory import open_store
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.postgres import PostgresCluster
from lightning_sql.testing.samples import make_span
from tests.database.wire import through_proxy
from tests.native_laws import broken_laws, queue_of
from tests.store.native import PATIENCE, at_once, key_of, started

pytestmark = pytest.mark.slow

Session: TypeAlias = "asyncpg.Connection[Any]"

NAME = "under test"
OURS = "application_name = $1 AND datname = current_database()"


@pytest.fixture
async def native(database_of: Callable[[str], str], request: pytest.FixtureRequest) -> AsyncIterator[SqlStore]:
    """A store in real time, with sessions of its own."""
    database = Database(database_of("postgres") + f"?application_name={NAME}")
    store = SqlStore(database, partition=request.node.name, scan_debounce_seconds=1e12)
    await store.query_workers()
    yield store
    wrong = await broken_laws(store, 4e9)
    await store.close()
    assert wrong == []


@pytest.fixture
async def other(database_of: Callable[[str], str]) -> AsyncIterator[Session]:
    """A session that is not the store's."""
    connection = await asyncpg.connect(database_of("postgres"))
    yield connection
    await connection.close()


async def end_sessions(other: Session) -> int:
    """End the store's sessions, whatever they are doing; how many there were."""
    await other.execute("SELECT pg_stat_clear_snapshot()")
    return await other.fetchval(f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OURS}", NAME)


@asynccontextmanager
async def locked(other: Session, table: str, mode: str) -> AsyncIterator[None]:
    """While nobody else can use a table in a way that conflicts with this mode."""
    async with other.transaction():
        await other.execute(f"LOCK TABLE {table} IN {mode} MODE")
        yield


async def until_blocked(other: Session) -> None:
    """Return when a session of the store waits for a lock."""
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL"
    async with asyncio.timeout(PATIENCE):
        while not await other.fetchval(blocked):  # noqa: ASYNC110 - it is in the database
            await asyncio.sleep(0.01)


async def test_sessions_that_end_while_idle_cost_no_call(native: SqlStore, other: Session) -> None:
    [rollout] = await started(native)
    await native.enqueue_rollout("queued")
    for turn, call in enumerate(
        [
            lambda: native.enqueue_rollout(1),
            native.dequeue_rollout,
            lambda: native.add_span(make_span(*key_of(rollout), "a")),
            lambda: native.update_attempt(*key_of(rollout), status="running"),
            lambda: native.get_next_span_sequence_id(*key_of(rollout)),
            lambda: native.update_worker("w"),
            lambda: native.get_rollout_by_id(rollout.rollout_id),
            native.query_rollouts,
            lambda: native.start_attempt(rollout.rollout_id),
            native.sweep,
        ]
    ):
        assert await end_sessions(other) >= 1, turn
        # The driver notices in its own time.
        await asyncio.sleep(0.05)
        assert await call() is not None, turn


async def broken(native: SqlStore, other: Session, table: str, call: Coroutine[Any, Any, Any]) -> Any:
    """What a call answers whose session is ended in the middle of its statement, or its error."""
    async with locked(other, table, "ACCESS EXCLUSIVE"):
        task = asyncio.ensure_future(call)
        await until_blocked(other)
        assert await end_sessions(other) >= 1
        await asyncio.sleep(0.1)
    return (await at_once(asyncio.wait_for(task, PATIENCE)))[0]


async def test_what_can_be_repeated_is(native: SqlStore, other: Session) -> None:
    [rollout] = await started(native)
    key = key_of(rollout)
    assert (await broken(native, other, "attempts", native.update_attempt(*key, metadata={"x": 1}))).metadata == {
        "x": 1
    }
    span = make_span(*key, "a", 4)
    # Of a span that may have been stored, only that it is there can be said.
    assert await broken(native, other, "spans", native.add_span(span)) in (span, None)
    assert (await native.query_spans(key[0])).items == [span]
    assert await broken(native, other, "span_sequences", native.get_next_span_sequence_id(*key)) >= 5
    assert (await broken(native, other, "workers", native.update_worker("w", {"y": 2}))).heartbeat_stats == {"y": 2}
    assert await broken(native, other, "rollouts", native.get_rollout_by_id(key[0])) is not None
    assert (await broken(native, other, "rollouts", native.query_rollouts())).total == 1
    again = await broken(native, other, "attempts", native.start_attempt(key[0]))
    assert again.attempt.sequence_id == 2
    begun = await broken(native, other, "attempts", native.start_rollout("whole"))
    assert [item.rollout_id for item in await native.query_attempts(begun.rollout_id)] == [begun.rollout_id]
    assert (await native.query_rollouts()).total == 2


async def test_what_the_server_has_undone_is_repeated(native: SqlStore, other: Session) -> None:
    """A server that says why it ends a session has not committed what it was doing."""
    requests = [EnqueueRolloutRequest(input=number) for number in range(3)]
    waiting = await broken(native, other, "rollouts", native.enqueue_many_rollouts(requests))
    assert await queue_of(native) == [rollout.rollout_id for rollout in waiting]
    claimed = await broken(native, other, "attempts", native.dequeue_many_rollouts(limit=2, worker_id="w"))
    assert [rollout.rollout_id for rollout in claimed] == [rollout.rollout_id for rollout in waiting[:2]]
    assert [rollout.attempt.sequence_id for rollout in claimed] == [1, 1]
    assert await queue_of(native) == [waiting[2].rollout_id]


async def test_sessions_that_have_just_ended_cost_no_call(native: SqlStore, other: Session) -> None:
    """The driver has not noticed yet, and sends the statement, or is just about to."""
    claimed: list[Any] = []
    for turn in range(10):
        await native.enqueue_many_rollouts([EnqueueRolloutRequest(input=turn), EnqueueRolloutRequest(input=turn)])
        assert await end_sessions(other) >= 1
        claimed += await at_once(native.dequeue_rollout(), native.dequeue_rollout("w"))
    assert [rollout.input for rollout in claimed] == [number // 2 for number in range(20)]


async def test_a_connection_that_breaks_without_a_word(
    database_of: Callable[[str], str], other: Session, request: pytest.FixtureRequest
) -> None:
    """Whether the statement took place is unknown: what can be repeated is, and of a claim it is found out."""
    async with through_proxy(database_of("postgres")) as wire:
        database = Database(wire.url)
        async with SqlStore(database, partition=request.node.name, scan_debounce_seconds=1e12) as store:
            waiting = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(5)])
            [rollout] = await started(store)

            async def cut_off(table: str, call: Coroutine[Any, Any, Any]) -> Any:
                async with locked(other, table, "ACCESS EXCLUSIVE"):
                    task = asyncio.ensure_future(call)
                    # A connection that was cut before may not have heard of it when it is used again.
                    blocked = asyncio.ensure_future(until_blocked(other))
                    await asyncio.wait({task, blocked}, return_when=asyncio.FIRST_COMPLETED)
                    blocked.cancel()
                    await wire.cut()
                return (await at_once(asyncio.wait_for(task, PATIENCE)))[0]

            requests = [EnqueueRolloutRequest(input="unknown") for _ in range(3)]
            enqueued = await cut_off("rollouts", store.enqueue_many_rollouts(requests))
            assert [item.input for item in enqueued] == ["unknown"] * 3
            claimed = await cut_off("attempts", store.dequeue_many_rollouts(limit=2))
            assert [item.input for item in claimed] == [0, 1]
            attempt = await cut_off("attempts", store.update_attempt(*key_of(rollout), status="failed"))
            assert attempt.status == "failed"
            # Whatever its sessions still did there, it is done now.
            async with asyncio.timeout(PATIENCE):
                while await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            unknown = [item for item in await store.query_rollouts() if item.input == "unknown"]
            assert [item.rollout_id for item in unknown] == [item.rollout_id for item in enqueued]
            queued = await queue_of(store)
            assert queued == [item.rollout_id for item in [*waiting[2:], *enqueued]]
            assert await broken_laws(store, 4e9) == []


@pytest.mark.parametrize("took_place", [True, False])
async def test_an_enqueue_whose_outcome_is_unknown_takes_place_once(
    native: SqlStore, monkeypatch: pytest.MonkeyPatch, took_place: bool
) -> None:
    hot = native._lanes.hot
    enqueue = hot.enqueue
    lost = 0

    async def unlucky(drafts: Any, now: float | None, notes: Any) -> Any:
        nonlocal lost
        lost += 1
        if lost > 2:
            return await enqueue(drafts, now, notes)
        if took_place and lost == 1:
            await enqueue(drafts, now, notes)
        raise CommitUnknownError

    monkeypatch.setattr(hot, "enqueue", unlucky)
    answers = await at_once(native.enqueue_rollout(0), native.enqueue_rollout(1), native.enqueue_rollout(2))
    assert lost == 3
    assert [rollout.input for rollout in answers] == [0, 1, 2]
    assert {rollout.status for rollout in answers} == {"queuing"}
    assert list(await native.query_rollouts()) == list(answers)
    assert await queue_of(native) == [rollout.rollout_id for rollout in answers]


async def test_an_enqueue_that_meets_a_stranger_under_its_id_fails(
    native: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = await native.enqueue_rollout("there")
    monkeypatch.setattr("lightning_sql.store.rows.new_rollout_id", lambda: there.rollout_id)
    with pytest.raises(DuplicatedPrimaryKeyError):
        await native.enqueue_rollout("another")
    assert list(await native.query_rollouts()) == [there]


async def test_many_calls_while_sessions_end_again_and_again(native: SqlStore, other: Session) -> None:
    """Whoever got an answer has what it says; nothing is done by half."""
    [rollout] = await started(native)
    enqueued: list[str] = []
    claimed: list[str] = []
    spans: list[str] = []
    done = False

    async def work(number: int) -> None:
        turn = 0
        while not done:
            turn += 1
            name = f"{number}-{turn}"
            for call, answers in (
                (native.enqueue_rollout(name), enqueued),
                (native.dequeue_rollout(f"w{number}"), claimed),
                (native.add_span(make_span(*key_of(rollout), name)), spans),
            ):
                try:
                    answer: Any = await call
                except DatabaseUnavailableError:
                    continue
                if answer is not None:
                    answers.append(answer.span_id if answers is spans else answer.rollout_id)

    async def end() -> None:
        nonlocal done
        turn = 0
        while turn < 12 or len(enqueued) <= 8:  # somebody gets through in between
            turn += 1
            await asyncio.sleep(0.05)
            await end_sessions(other)
        await asyncio.sleep(0.1)
        done = True

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(end(), *(work(number) for number in range(8)))
    assert len(set(claimed)) == len(claimed)
    there = {item.rollout_id for item in await native.query_rollouts()}
    assert {*enqueued, *claimed} <= there
    assert set(spans) <= {span.span_id for span in await native.query_spans(rollout.rollout_id)}
    queued = await queue_of(native)
    assert not set(queued) & set(claimed)


async def test_what_was_acknowledged_outlives_the_server(postgres_cluster: PostgresCluster) -> None:
    """Law 1: the server is killed while callers write, and everything that they were told is there afterwards."""
    url = postgres_cluster.create_database()
    acknowledged: dict[str, Any] = {}
    enough = asyncio.Event()
    async with await open_store(url, database_wait_seconds=1) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="waits") for _ in range(200)])

        async def work(number: int) -> None:
            while True:
                try:
                    claimed = await store.dequeue_rollout(f"w{number}")
                    assert claimed is not None
                    await store.add_span(make_span(*key_of(claimed), "a", 7))
                    await store.update_attempt(*key_of(claimed), status="succeeded")
                    acknowledged[claimed.rollout_id] = claimed.attempt.attempt_id
                    acknowledged[(await store.enqueue_rollout("new")).rollout_id] = None
                    if len(acknowledged) >= 60:
                        enough.set()
                except DatabaseUnavailableError:
                    return

        async def kill() -> None:
            await enough.wait()
            postgres_cluster.kill()

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(kill(), *(work(number) for number in range(10)))
        postgres_cluster.start()
        for rollout_id, attempt_id in acknowledged.items():
            found: Any = await store.get_rollout_by_id(rollout_id)
            assert found is not None
            if attempt_id is not None:
                assert (found.status, found.attempt.attempt_id) == ("succeeded", attempt_id)
                assert (await store.query_spans(rollout_id)).total == 1
        assert await broken_laws(store, 4e9) == []
