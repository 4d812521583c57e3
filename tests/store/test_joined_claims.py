"""Claims that go to the database together, and the front of the queue from which they look."""

import asyncio

import pytest

from lightning_sql.database.dialects.hot import Claim
from lightning_sql.database.dialects.postgresql_hot import PostgreSQLHotPath
from lightning_sql.database.dialects.queue_front import FRONT_AGE_SECONDS, FULL_SCAN_SECONDS, QueueFront
from lightning_sql.store.sql_store import SqlStore
from tests.native_laws import rows_of

WORKERS = ["w", "\x1f", "\x1e", "a\x1fb\x1ec", "ü😀", "NULL", '"']
"""Some that are what stands between the texts that travel together."""


async def statuses(store: SqlStore) -> dict[str, str]:
    return {worker.worker_id: worker.status for worker in await store.query_workers()}


@pytest.mark.parametrize("rollouts", [0, 1, 3])
async def test_a_claim_of_nothing_notes_its_worker_beside_others(store: SqlStore, rollouts: int) -> None:
    for number in range(rollouts):
        await store.enqueue_rollout(number)
    answers = await asyncio.gather(store.claim_rows(0, "idle"), store.claim_rows(1, "eager"))
    assert [len(rows) for rows in answers] == [0, min(rollouts, 1)]
    assert await statuses(store) == {"idle": "idle", "eager": "busy" if rollouts else "idle"}


async def test_claims_of_nothing_note_their_workers(store: SqlStore) -> None:
    assert await asyncio.gather(*(store.claim_rows(0, worker) for worker in WORKERS)) == [[]] * len(WORKERS)
    assert await statuses(store) == dict.fromkeys(WORKERS, "idle")


@pytest.mark.parametrize("limit", [1, 2])
async def test_workers_of_any_name_claim_together(store: SqlStore, limit: int) -> None:
    for number in range(limit * len(WORKERS)):
        await store.enqueue_rollout(number)
    answers = await asyncio.gather(*(store.claim_rows(limit, worker) for worker in [*WORKERS, None]))
    assert [len(rows) for rows in answers] == [limit] * len(WORKERS) + [0]
    assert await statuses(store) == dict.fromkeys(WORKERS, "busy")
    attempts = {worker: await store.query_attempts(rows[0][0]) for worker, rows in zip(WORKERS, answers, strict=False)}
    assert {worker: [attempt.worker_id for attempt in found] for worker, found in attempts.items()} == {
        worker: [worker] for worker in WORKERS
    }


@pytest.mark.parametrize("wanted", [0, 1, 2])
async def test_one_statement_takes_claims_of_any_size(store: SqlStore, wanted: int) -> None:
    await store.enqueue_rollout(1)
    claims = [Claim("none", []), Claim("some", [f"at-{number}" for number in range(wanted)]), Claim(None, [])]
    _, given = await store._lanes.hot.claim(claims, None)
    assert [len(rows) for rows in given] == [0, min(wanted, 1), 0]
    assert await statuses(store) == {"none": "idle", "some": "busy" if wanted else "idle"}


async def test_a_worker_without_a_name_is_stored_as_it_was_answered(store: SqlStore) -> None:
    await store.enqueue_rollout(1)
    answers = await asyncio.gather(store.claim_rows(0, "a"), store.claim_rows(1, ""), store.claim_rows(0, "b"))
    [claimed] = answers[1]
    attempt = await store.get_latest_attempt(claimed[0])
    assert attempt is not None
    assert (claimed[18], attempt.worker_id) == ("", "")


# The front of the queue, which only PostgreSQL's way remembers


def test_the_front_of_the_queue_is_remembered_and_forgotten() -> None:
    now = [1000.0]
    front = QueueFront(lambda: now[0])
    assert front.floor() == 0
    front.seen(100)
    now[0] += FULL_SCAN_SECONDS / 4
    assert front.floor() == 0
    steps = 0
    position = 100
    while front.floor() == 0:
        steps += 1
        assert steps < 1000
        position += 10
        front.seen(position)
        now[0] += FULL_SCAN_SECONDS / 4
    # What it skips was behind the front long ago.
    assert 0 < front.floor() < position
    floors: list[int] = []
    for _ in range(100):
        now[0] += FULL_SCAN_SECONDS / 4
        position += 10
        floors.append(front.floor())
        front.seen(position)
    assert floors.count(0) >= 20
    assert max(floors) <= position
    assert sorted(floor for floor in floors if floor) == [floor for floor in floors if floor]
    now[0] += FULL_SCAN_SECONDS
    assert front.floor() == 0
    front.seen(5)
    now[0] += FULL_SCAN_SECONDS / 4
    assert front.floor() <= 4
    assert FRONT_AGE_SECONDS >= FULL_SCAN_SECONDS


def test_what_came_late_takes_back_what_was_noted_behind_it() -> None:
    now = [0.0]
    front = QueueFront(lambda: now[0])
    assert front.floor() == 0
    front.seen(500)
    for moment, position in ((0.1, 101), (0.4, 102), (0.5, 103)):
        now[0] = FRONT_AGE_SECONDS * 2 * moment
        front.floor()
        front.seen(position)
    for _ in range(100):
        now[0] += FRONT_AGE_SECONDS / 10
        assert front.floor() <= 103


def hide_everything(store: SqlStore) -> None:
    """Let the front be taken for one that nothing is behind."""
    hot = store._lanes.hot
    if isinstance(hot, PostgreSQLHotPath):
        hot._front.floor()
        hot._front._floor = 2**40


@pytest.mark.parametrize("workers", [1, 3])
async def test_nobody_goes_away_with_nothing_while_something_is_queued(store: SqlStore, workers: int) -> None:
    for number in range(workers):
        await store.enqueue_rollout(number)
    hide_everything(store)
    answers = await asyncio.gather(*(store.dequeue_rollout(f"w{number}") for number in range(workers)))
    assert [None if rollout is None else rollout.input for rollout in answers] == list(range(workers))
    assert await statuses(store) == {f"w{number}": "busy" for number in range(workers)}
    assert await store.dequeue_rollout("w0") is None


async def test_a_second_look_gives_to_those_who_got_nothing(store: SqlStore) -> None:
    first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
    hot = store._lanes.hot
    if isinstance(hot, PostgreSQLHotPath):
        rows = await store._lanes.hot.claim([Claim("x", ["at-x"])], None)
        assert rows[1][0][0][0] == first.rollout_id
        await store.update_rollout(first.rollout_id, status="queuing")
        [[position]] = await rows_of(store, "SELECT min(queue_position) FROM rollouts WHERE partition_id = :partition")
        hot._front.floor()
        hot._front._floor = position
    claims = [Claim(name, [f"at-{name}"]) for name in ("a", "b", "c")]
    instant, given = await hot.claim(claims, None)
    assert sorted(row[0] for rows in given for row in rows) == sorted([first.rollout_id, second.rollout_id])
    for rows in given:
        for row in rows:
            attempt = await store.get_latest_attempt(row[0])
            assert attempt is not None
            assert attempt.start_time == instant
