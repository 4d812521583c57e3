"""What a store records of itself."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from lightning_sql.errors import RecordNotFoundError
from lightning_sql.metrics import (
    BATCH_CALLS,
    CLAIMS,
    COLLECTION_CALLS,
    COLLECTION_LATENCY,
    ENQUEUED,
    METRICS,
    NOTIFICATION_LAG,
    RETRIES,
    ROLLOUTS_DURATION,
    ROLLOUTS_FINISHED,
    SPANS,
    STORE_CALLS,
    STORE_LATENCY,
    Labels,
    Metric,
)
from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import make_span
from tests.backends import POSTGRES


class Notes:
    """A recorder that remembers everything."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Metric, Labels]] = Counter()
        self.observations: dict[tuple[Metric, Labels], list[float]] = {}

    def expect(self, metric: Metric, labels: Labels) -> None:
        assert len(labels) == len(metric.labels)

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        assert metric.kind == "counter"
        assert len(labels) == len(metric.labels)
        self.counts[metric, labels] += int(amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        assert metric.kind == "histogram"
        assert len(labels) == len(metric.labels)
        assert value >= 0
        self.observations.setdefault((metric, labels), []).append(value)

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        pytest.fail(f"a store sets no gauge, so not {metric.name}")

    def calls(self, metric: Metric) -> dict[Labels, int]:
        return {labels: count for (known, labels), count in self.counts.items() if known is metric and count}


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture(params=["memory", "sqlite", POSTGRES])
async def store(request: pytest.FixtureRequest, notes: Notes, sqlite_url: str) -> AsyncIterator[LightningStore]:
    kind: str = request.param
    url = {"memory": "memory://", "sqlite": sqlite_url}.get(kind) or request.getfixturevalue("postgres_url")
    async with await open_store(url, recorder=notes, scan_debounce_seconds=1000.0) as opened:
        yield opened


async def test_calls_count_once_with_what_came_of_them(store: LightningStore, notes: Notes) -> None:
    await store.enqueue_rollout(1)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=2)])
    await store.dequeue_rollout(worker_id="w")
    await store.query_rollouts()
    with pytest.raises(RecordNotFoundError):
        await store.update_rollout("nope", status="failed")
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[(await store.enqueue_rollout(3)).rollout_id]))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    expected = {
        ("enqueue_rollout", "OK"): 2,
        ("enqueue_many_rollouts", "OK"): 1,
        ("dequeue_rollout", "OK"): 1,
        ("query_rollouts", "OK"): 1,
        ("update_rollout", "RecordNotFoundError"): 1,
        ("wait_for_rollouts", "499"): 1,
    }
    assert notes.calls(STORE_CALLS) == {(name, name, status): count for (name, status), count in expected.items()}
    for labels, count in notes.calls(STORE_CALLS).items():
        assert len(notes.observations[STORE_LATENCY, labels]) == count


async def test_rows_count_as_the_methods_that_they_are_of(store: LightningStore, notes: Notes) -> None:
    if store.rows is None:
        assert not notes.counts
        return
    started = await store.start_rollout(1)
    await store.rows.rollout_row(started.rollout_id)
    await store.rows.next_number(started.rollout_id)
    assert notes.calls(STORE_CALLS) == {
        (name, name, "OK"): 1 for name in ("start_rollout", "get_rollout_by_id", "get_next_span_sequence_id")
    }


async def test_collections_count_under_the_store_method(store: LightningStore, notes: Notes) -> None:
    await store.enqueue_rollout(1, mode="train")
    await store.dequeue_rollout(worker_id="w")
    calls = notes.calls(COLLECTION_CALLS)
    touched = {(public, collection) for public, _, _, collection, status in calls if status == "OK"}
    # A statement may be for calls of several methods: it counts as the one that takes many.
    for public, collection in (("enqueue", "rollouts"), ("dequeue", "attempts"), ("dequeue", "workers")):
        assert any(method.startswith(public) and name == collection for method, name in touched), (public, collection)
    for labels, count in calls.items():
        assert len(notes.observations[COLLECTION_LATENCY, labels]) == count


async def test_rollouts_count_when_they_finish(store: LightningStore, notes: Notes) -> None:
    rollouts = [await store.enqueue_rollout(1, mode=mode) for mode in ("train", "val", None, None)]
    first = await store.dequeue_rollout(worker_id="w")
    assert first is not None
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="running")
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="succeeded")
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, metadata={"again": True})
    await store.update_rollout(rollouts[1].rollout_id, status="cancelled")
    await store.update_rollout(rollouts[1].rollout_id, metadata={"again": True})
    await store.update_rollout(rollouts[2].rollout_id, status="failed")
    finished = {("succeeded", "train"): 1, ("cancelled", "val"): 1, ("failed", "unknown"): 1}
    assert notes.calls(ROLLOUTS_FINISHED) == finished
    for labels in finished:
        [seconds] = notes.observations[ROLLOUTS_DURATION, labels]
        assert seconds < 60


async def test_the_watchdog_counts_what_it_finishes(store: LightningStore, notes: Notes) -> None:
    await store.start_rollout(1, mode="test", config=RolloutConfig(timeout_seconds=0.001))
    await asyncio.sleep(0.01)
    assert await store.sweep() == 1
    assert notes.calls(ROLLOUTS_FINISHED) == {("failed", "test"): 1}


async def test_work_is_counted(store: LightningStore, notes: Notes) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number, config=config) for number in range(3)])
    claimed = await store.dequeue_many_rollouts(limit=2, worker_id="w")
    key = claimed[0].rollout_id, claimed[0].attempt.attempt_id
    await store.add_many_spans([make_span(*key, "a", 1), make_span(*key, "b", 2), make_span(*key, "a", 1)])
    await store.add_span(make_span(*key, "b", 2))
    await store.import_spans([make_span(*key, "b", 2), make_span(*key, "c", 3), make_span("nope", "nope", "d", 1)])
    await store.update_attempt(*key, status="failed")
    assert len(await store.dequeue_many_rollouts(limit=2, worker_id="w")) == 2
    counted = {metric: notes.counts[metric, ()] for metric in (ENQUEUED, CLAIMS, RETRIES, SPANS)}
    assert counted == {ENQUEUED: 3, CLAIMS: 4, RETRIES: 1, SPANS: 3}


async def test_who_waited_is_told_late(store: LightningStore, notes: Notes) -> None:
    rollout = await store.enqueue_rollout(1)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30))
    await asyncio.sleep(0.05)
    await store.update_rollout(rollout.rollout_id, status="failed")
    assert len(await waiting) == 1
    assert len(notes.observations[NOTIFICATION_LAG, ()]) == 1
    other = await store.enqueue_rollout(2)
    assert await store.wait_for_rollouts(rollout_ids=[other.rollout_id], timeout=0.05) == []
    assert len(notes.observations[NOTIFICATION_LAG, ()]) == 1


async def test_calls_that_join_are_one_statement(sqlite_url: str, notes: Notes) -> None:
    async with await open_store(sqlite_url, recorder=notes) as store:
        await store.enqueue_rollout(0)
        await asyncio.gather(*(store.enqueue_rollout(number) for number in range(20)))
    sizes = notes.observations[BATCH_CALLS, ("enqueue",)]
    assert sum(sizes) == 21
    assert len(sizes) < 21
    statements = sum(count for labels, count in notes.calls(COLLECTION_CALLS).items() if labels[3] == "rollout_queue")
    assert statements == len(sizes)


async def test_the_state_of_the_queue(store: LightningStore) -> None:
    assert (await store.queue_state()).oldest_seconds == 0.0
    await store.start_rollout(0, config=RolloutConfig(timeout_seconds=-1.0))
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
    await store.dequeue_rollout()
    await asyncio.sleep(0.05)
    state = await store.queue_state()
    assert (state.queued, state.running) == (2, 2)
    assert 0.05 <= state.oldest_seconds < 60
    usage = store.usage()
    if store.rows is not None:
        assert state.due == 1
        assert usage.connections_idle > 0
        assert set(usage.calls_waiting.values()) == {0}


async def test_nothing_is_recorded_for_nobody(sqlite_url: str) -> None:
    async with await open_store(sqlite_url) as store:
        assert store.recorder is None
        await store.enqueue_rollout(1)


def test_names_are_told_apart() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert bool(metric.buckets) is (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


async def test_a_call_makes_few_notes(sqlite_url: str) -> None:
    notes = Notes()
    async with await open_store(sqlite_url, recorder=notes, scan_debounce_seconds=1000.0) as store:
        await store.enqueue_rollout(1)
        notes.counts.clear()
        notes.observations.clear()
        await store.enqueue_rollout(1)
    assert sum(map(len, notes.observations.values())) == 4  # the call, the statement, and its two collections
    assert len(notes.counts) == 4
