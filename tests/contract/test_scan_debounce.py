"""The watchdog looks once per debounce window, however many callers ask at once; an injected clock drives it."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lightning_sql.database.engine import Database
from lightning_sql.errors import DatabaseUnavailableError
from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.backends import COLLECTIONS, POSTGRES, Clock, CollectionsOf

DEBOUNCE = 10.0


class CountingStore(LightningStore):
    """Counts its scans, and how many of them run at once; for a class that is a store besides."""

    scans = 0
    running = 0
    most_running = 0
    failure: Exception | None = None

    async def sweep(self) -> int:
        self.scans += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.002)
            if self.failure is not None:
                raise self.failure
            scan: Any = super()
            return await scan.sweep()
        finally:
            self.running -= 1

    def scans_since(self) -> int:
        """How many scans there were since this was last asked."""
        count, self.scans = self.scans, 0
        return count


class CountingCollectionStore(CountingStore, CollectionStore):
    pass


class CountingSqlStore(CountingStore, SqlStore):
    pass


MakeStore = Callable[[float], CountingStore]


@pytest.fixture(params=["memory", "sqlite", POSTGRES, *COLLECTIONS])
async def make_store(
    request: pytest.FixtureRequest,
    collections_of: CollectionsOf,
    database_of: Callable[[str], str],
    clock: Clock,
) -> AsyncIterator[MakeStore]:
    kind: str = request.param
    opened: list[CountingStore] = []

    def make(debounce_seconds: float) -> CountingStore:
        options: Any = {"scan_debounce_seconds": debounce_seconds, "clock": clock}
        store = (
            CountingSqlStore(Database(database_of(kind)), partition=uuid.uuid4().hex, **options)
            if kind in ("sqlite", "postgres")
            else CountingCollectionStore(collections_of(kind.removeprefix("collections-")), **options)
        )
        opened.append(store)
        return store

    yield make
    for store in opened:
        await store.close()


def scanning_calls(store: CountingStore, rollout_id: str) -> list[Callable[[], Awaitable[Any]]]:
    """Every call that looks for overdue attempts first (CONTRACT.md section 7.8)."""
    return [
        lambda: store.start_rollout(1),
        lambda: store.enqueue_rollout(1),
        lambda: store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)]),
        store.dequeue_rollout,
        lambda: store.dequeue_many_rollouts(limit=2),
        lambda: store.start_attempt(rollout_id),
        store.query_rollouts,
        lambda: store.get_rollout_by_id(rollout_id),
        lambda: store.query_attempts(rollout_id),
        lambda: store.get_latest_attempt(rollout_id),
        lambda: store.update_resources("r", {}),
        lambda: store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=0),
        lambda: store.query_spans(rollout_id),
        lambda: store.update_rollout(rollout_id, metadata={}),
        lambda: store.update_attempt(rollout_id, "latest", metadata={}),
        store.query_workers,
    ]


async def test_one_scan_among_concurrent_callers_in_a_window(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    rollout_id = (await store.start_rollout(1)).rollout_id
    assert store.scans_since() == 1
    calls = scanning_calls(store, rollout_id)
    steps = [(0.0, 0), (DEBOUNCE / 2, 0), (DEBOUNCE / 2, 1), (0.0, 0), (9.875, 0), (0.125, 1), (99.0, 1)]
    for seconds, expected in steps:
        clock.now += seconds
        await asyncio.gather(*(call() for call in calls))
        assert store.scans_since() == expected
    assert store.most_running == 1


@pytest.mark.parametrize("number", range(16))
async def test_each_of_these_calls_scans_when_it_is_time(make_store: MakeStore, clock: Clock, number: int) -> None:
    store = make_store(DEBOUNCE)
    rollout_id = (await store.start_rollout(1)).rollout_id
    clock.now += DEBOUNCE
    store.scans_since()
    calls = scanning_calls(store, rollout_id)
    assert len(calls) == 16
    await calls[number]()
    assert store.scans_since() == 1


async def test_other_calls_do_not_scan(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    started = await store.start_rollout(1, worker_id="w")
    key = (started.rollout_id, started.attempt.attempt_id)
    clock.now += 2 * DEBOUNCE
    store.scans_since()
    await store.add_span(make_span(*key, "a"))
    await store.add_many_spans([make_span(*key, "b")])
    await store.import_spans([make_span(*key, "c")])
    await store.get_next_span_sequence_id(*key)
    await store.get_many_span_sequence_ids([key])
    await store.add_resources({})
    await store.get_resources_by_id("r")
    await store.get_latest_resources()
    await store.query_resources()
    await store.get_worker_by_id("w")
    await store.update_worker("w")
    await store.statistics()
    await store.ping()
    assert store.scans_since() == 0


async def test_callers_that_come_during_a_scan_see_what_it_did(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1.0))
    store.scans_since()
    clock.now += DEBOUNCE
    seen = await asyncio.gather(*(store.get_rollout_by_id(started.rollout_id) for _ in range(12)))
    assert [rollout.status for rollout in seen if rollout is not None] == ["failed"] * 12
    assert store.scans_since() == 1


async def test_within_the_window_nothing_is_ended(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1.0))
    clock.now += DEBOUNCE - 1.0
    rollout = await store.get_rollout_by_id(started.rollout_id)
    assert rollout is not None
    assert rollout.status == "preparing"


async def test_without_a_debounce_every_call_scans(make_store: MakeStore) -> None:
    store = make_store(0.0)
    rollout_id = (await store.start_rollout(1)).rollout_id
    store.scans_since()
    calls = scanning_calls(store, rollout_id)
    await asyncio.gather(*(call() for call in calls))
    assert store.scans_since() == len(calls)


async def test_a_scan_that_fails_fails_no_call(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1.0))
    clock.now += DEBOUNCE
    store.scans_since()
    store.failure = DatabaseUnavailableError()
    seen = await asyncio.gather(*(store.get_rollout_by_id(started.rollout_id) for _ in range(5)))
    assert [rollout.status for rollout in seen if rollout is not None] == ["preparing"] * 5
    assert store.scans_since() == 1
    store.failure = None
    clock.now += DEBOUNCE
    rollout = await store.get_rollout_by_id(started.rollout_id)
    assert rollout is not None
    assert rollout.status == "failed"


async def test_a_caller_that_gives_up_leaves_the_next_one_its_scan(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(DEBOUNCE)
    started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1.0))
    clock.now += DEBOUNCE
    impatient = asyncio.create_task(store.query_workers())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    rollout = await store.get_rollout_by_id(started.rollout_id)
    assert rollout is not None
    assert rollout.status == "failed"
