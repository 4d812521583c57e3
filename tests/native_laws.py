"""What must be true of the native store's tables at every commit, whatever calls led there.

DESIGN.md sections 1 and 3: the laws that an answer of the store does not show, or shows only later.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from lightning_sql import lifecycle
from lightning_sql.database.payload import encode_text
from lightning_sql.records import ROLLOUT_ACTIVE, ROLLOUT_QUEUED
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.sql_store import SqlStore

__all__ = ["broken_laws", "queue_of", "rows_of"]

ROLLOUTS = """
SELECT rollout_id, status, queue_position, attempt_count, watch_at, timeout_seconds, unresponsive_seconds, seq,
    end_time
FROM rollouts WHERE partition_id = :partition ORDER BY seq
"""
ATTEMPTS = """
SELECT rollout_id, sequence_id, start_time, last_heartbeat_time, status
FROM attempts WHERE partition_id = :partition ORDER BY rollout_id, sequence_id
"""
SPANS = """
SELECT s.rollout_id, max(s.sequence_id),
    max(CASE WHEN a.attempt_id IS NULL THEN 1 ELSE 0 END), count(*), count(DISTINCT s.seq)
FROM spans s LEFT JOIN attempts a
    ON a.partition_id = s.partition_id AND a.rollout_id = s.rollout_id AND a.attempt_id = s.attempt_id
WHERE s.partition_id = :partition GROUP BY s.rollout_id
"""
COUNTERS = "SELECT rollout_id, value FROM span_sequences WHERE partition_id = :partition"
WORKERS = (
    "SELECT worker_id, status, current_rollout_id, current_attempt_id FROM workers WHERE partition_id = :partition"
)
QUEUE = """
SELECT rollout_id FROM rollouts
WHERE partition_id = :partition AND queue_position IS NOT NULL ORDER BY queue_position
"""


async def rows_of(store: SqlStore, sql: str, **values: Any) -> list[tuple[Any, ...]]:
    """The rows of a statement that reads, in the running event loop; `:partition` is the store's."""
    statement = text(sql).bindparams(partition=encode_text(store._partition), **values)
    return [tuple(row) for row in await store._lanes.fetch(statement)]


async def _state_of(store: SqlStore, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows of several statements in one transaction that reads."""

    def rows(connection: Connection) -> list[list[tuple[Any, ...]]]:
        statements = [text(sql).bindparams(partition=encode_text(store._partition)) for sql in queries]
        return [[tuple(row) for row in connection.execute(statement)] for statement in statements]

    return await store._database.retried(lambda: store._lanes.hot.read(rows), repeatable=True)


async def queue_of(store: SqlStore) -> list[str]:
    """The ids in the queue, from the front."""
    return [rollout_id for (rollout_id,) in await rows_of(store, QUEUE)]


async def broken_laws(store: LightningStore, now: float) -> list[str]:
    """What is wrong in the tables of a native store at the time `now`, in one state of them; nothing for others."""
    if not isinstance(store, SqlStore):
        return []
    state = await _state_of(store, ROLLOUTS, ATTEMPTS, SPANS, COUNTERS, WORKERS)
    rollouts, all_attempts, spans, counts, workers = state
    attempts: dict[str, list[tuple[Any, ...]]] = {}
    for rollout_id, *attempt in all_attempts:
        attempts.setdefault(rollout_id, []).append(tuple(attempt))
    wrong = [f"an attempt of no rollout: {lost!r}" for lost in attempts.keys() - {row[0] for row in rollouts}]
    for row in rollouts:
        wrong += _of_rollout(row, attempts.get(row[0], []), now, store._claim_timeout)
    places = [row[2] for row in rollouts if row[2] is not None]
    if len(set(places)) != len(places):
        wrong.append("two rollouts in one place of the queue")
    counters = dict(counts)
    for rollout_id, highest, lost, count, orders in spans:
        if lost:
            wrong.append(f"a span of no attempt of {rollout_id!r}")
        if count != orders:
            wrong.append(f"two spans of {rollout_id!r} with one insertion number")
        if counters.get(rollout_id, 0) < highest:
            wrong.append(f"{rollout_id!r} has span {highest}, but its counter is {counters.get(rollout_id)}")
    for worker_id, status, *current in workers:
        if status == "busy" and None in current:
            wrong.append(f"worker {worker_id!r} is busy with nothing")
    return wrong


def _of_rollout(
    row: Sequence[Any], attempts: Sequence[tuple[Any, ...]], now: float, claim_timeout: float | None
) -> list[str]:
    rollout_id, status, position, count, watch_at, timeout, unresponsive, _, end_time = row
    wrong: list[str] = []
    if (position is not None) != (status in ROLLOUT_QUEUED):
        wrong.append(f"{rollout_id!r} is {status}, but its place in the queue is {position}")
    if (end_time is not None) != lifecycle.is_finished(status):
        wrong.append(f"{rollout_id!r} is {status}, but it ended {end_time}")
    numbers = [attempt[0] for attempt in attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        wrong.append(f"the attempts of {rollout_id!r} are numbered {numbers}")
    if count != len(attempts):
        wrong.append(f"{rollout_id!r} counts {count} attempts of {len(attempts)}")
    begun, heard, attempt_status = attempts[-1][1:] if attempts else (0.0, None, "none")
    limit = claim_timeout if attempt_status == "preparing" and heard is None else None
    watched = status in ROLLOUT_ACTIVE and not timeout is unresponsive is limit is None
    if not watched:
        # Where claims have limits, the watchdog may yet find out that something was heard.
        if watch_at is not None and (claim_timeout is None or status not in ROLLOUT_ACTIVE):
            wrong.append(f"{rollout_id!r} is {status} with limits {timeout}, {unresponsive}, but watched")
    elif attempts:
        # A lower bound; what is due already is looked at by the next sweep, however long it has been so.
        due = lifecycle.watch_time(timeout, unresponsive, begun, heard, limit)
        if watch_at is None or (due is not None and watch_at > max(due, now)):
            wrong.append(f"{rollout_id!r} is due at {due}, but watched at {watch_at}")
    return wrong
