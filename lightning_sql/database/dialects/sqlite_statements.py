"""The statements of the hot operations on SQLite. All are prepared once and run on every batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

from lightning_sql.database.dialects.hot import RolloutDraft, SpanDraft
from lightning_sql.database.dialects.words import word
from lightning_sql.database.native import ATTEMPT_COLUMNS, ROLLOUT_COLUMNS, WORKER_COLUMNS
from lightning_sql.records import ROLLOUT_FINISHED, RolloutStatus

__all__ = [
    "ATTEMPTS_BY_ID",
    "ATTEMPT_FIELDS",
    "BEAT_ATTEMPT",
    "BEAT_WORKER",
    "CLAIM_ROLLOUT",
    "FINISHED_BY_ID",
    "INSERT_ATTEMPT",
    "INSERT_NOTE",
    "INSERT_ROLLOUT",
    "INSERT_SPAN",
    "ISSUE_NUMBERS",
    "IS_ATTEMPT",
    "IS_NOTE",
    "IS_SPAN",
    "LATEST_ATTEMPTS",
    "LATEST_RESOURCES",
    "NEXT_POSITION",
    "NEXT_ROLLOUT",
    "NEXT_SPAN",
    "QUEUE_FRONT",
    "RAISE_NUMBER",
    "ROLLOUTS_BY_ID",
    "SPAN_ORDER",
    "SPAN_OWNERS",
    "UPDATE_ATTEMPT",
    "UPDATE_ROLLOUT",
    "WATCH_ROLLOUT",
    "WORKERS_BY_ID",
    "WORKER_STATUS",
    "RolloutState",
    "worker_statements",
]


class RolloutState(NamedTuple):
    """What decides about a rollout when an attempt of it changes."""

    rowid: int
    status: RolloutStatus
    attempt_count: int
    max_attempts: int
    retry_condition: str
    timeout_seconds: float | None
    unresponsive_seconds: float | None
    queue_position: int | None
    watch_at: float | None
    mode: str | None
    start_time: float

    @property
    def is_limited(self) -> bool:
        """Whether the watchdog has anything to look for."""
        return self.timeout_seconds is not None or self.unresponsive_seconds is not None


def _columns(names: Iterable[str], table: str) -> str:
    return ", ".join(f"{table}.{name}" for name in names)


def _insert(table: str, columns: Sequence[str], rest: str = "") -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) {rest}"


def _next_order(table: str) -> str:
    # Row numbers keep the order of insertion, so the last row has the highest; this needs no index.
    return f"coalesce((SELECT seq FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})), 0) + 1"


_NEXT_POSITION: Final = """
coalesce((SELECT max(queue_position) FROM rollouts WHERE partition_id = ? AND queue_position IS NOT NULL), 0) + 1
"""
# Many rows are looked up by one statement, with their keys as a JSON array; `given.key` is the place in it.
# CROSS JOIN keeps SQLite from turning the order of tables around, whatever it thinks of their sizes.
_ATTEMPTS_BY_ID: Final = """
FROM json_each(?) AS given CROSS JOIN attempts AS a
ON a.partition_id = ? AND a.rollout_id = json_extract(given.value, '$[0]')
AND a.attempt_id = json_extract(given.value, '$[1]')
CROSS JOIN rollouts AS r ON r.partition_id = a.partition_id AND r.rollout_id = a.rollout_id
"""
_LATEST_ATTEMPTS: Final = """
FROM json_each(?) AS given CROSS JOIN rollouts AS r ON r.partition_id = ? AND r.rollout_id = given.value
CROSS JOIN attempts AS a
ON a.partition_id = r.partition_id AND a.rollout_id = r.rollout_id AND a.sequence_id = r.attempt_count
"""

LATEST_RESOURCES: Final = """
SELECT resources_id FROM resources WHERE partition_id = ? ORDER BY update_time DESC LIMIT 1
"""
NEXT_ROLLOUT: Final = f"SELECT {_next_order('rollouts')}, {_NEXT_POSITION}"
NEXT_POSITION: Final = f"SELECT {_NEXT_POSITION}"
NEXT_SPAN: Final = f"SELECT {_next_order('spans')}"
INSERT_ROLLOUT: Final = _insert(
    "rollouts",
    ("partition_id", "seq", "status", "start_time", "queue_position", "attempt_count", *RolloutDraft._fields),
)

IS_NOTE: Final = "SELECT 1 FROM idempotency_keys WHERE partition_id = ? AND key = ? AND part = ?"
INSERT_NOTE: Final = _insert("idempotency_keys", ("partition_id", "key", "route", "fingerprint", "part", "ids", "time"))

_CLAIMED: Final = {"status": "'preparing' AS status", "end_time": "NULL AS end_time"}
QUEUE_FRONT: Final = f"""
SELECT {", ".join(_CLAIMED.get(name, name) for name in ROLLOUT_COLUMNS)},
    rowid, attempt_count + 1 AS number, timeout_seconds, unresponsive_seconds
FROM rollouts WHERE partition_id = ? AND queue_position IS NOT NULL ORDER BY queue_position LIMIT ?
"""
CLAIM_ROLLOUT: Final = """
UPDATE rollouts SET status = 'preparing', end_time = NULL, queue_position = NULL, attempt_count = ?, watch_at = ?
WHERE rowid = ?
"""
INSERT_ATTEMPT: Final = _insert(
    "attempts", ("partition_id", "rollout_id", "attempt_id", "sequence_id", "status", "worker_id", "start_time")
)

SPAN_OWNERS: Final = f"""
SELECT given.key, a.rowid, a.status, a.sequence_id,
    coalesce((SELECT value FROM span_sequences AS s WHERE s.partition_id = a.partition_id
        AND s.rollout_id = a.rollout_id), 0),
    {_columns(RolloutState._fields, "r")}
{_ATTEMPTS_BY_ID}
"""
INSERT_SPAN: Final = _insert("spans", ("partition_id", "seq", *SpanDraft._fields), "ON CONFLICT DO NOTHING")
SPAN_ORDER: Final = """
SELECT seq FROM spans WHERE partition_id = ? AND rollout_id = ? AND attempt_id = ? AND span_id = ?
"""
BEAT_ATTEMPT: Final = "UPDATE attempts SET last_heartbeat_time = ?, status = ? WHERE rowid = ?"
RAISE_NUMBER: Final = _insert(
    "span_sequences",
    ("partition_id", "rollout_id", "value"),
    "ON CONFLICT (partition_id, rollout_id) DO UPDATE SET value = excluded.value",
)
ISSUE_NUMBERS: Final = _insert(
    "span_sequences",
    ("partition_id", "rollout_id", "value"),
    "ON CONFLICT (partition_id, rollout_id) DO UPDATE SET value = value + excluded.value RETURNING value",
)

_ATTEMPT: Final = f"""
SELECT given.key, {_columns(ATTEMPT_COLUMNS, "a")}, a.rowid, {_columns(RolloutState._fields, "r")}
"""
ATTEMPTS_BY_ID: Final = _ATTEMPT + _ATTEMPTS_BY_ID
LATEST_ATTEMPTS: Final = _ATTEMPT + _LATEST_ATTEMPTS
ATTEMPT_FIELDS: Final = ("status", "worker_id", "end_time", "last_heartbeat_time", "metadata")
UPDATE_ATTEMPT: Final = f"UPDATE attempts SET {', '.join(f'{name} = ?' for name in ATTEMPT_FIELDS)} WHERE rowid = ?"
UPDATE_ROLLOUT: Final = """
UPDATE rollouts SET status = ?, end_time = ?, queue_position = ?, watch_at = ? WHERE rowid = ?
"""
WATCH_ROLLOUT: Final = "UPDATE rollouts SET watch_at = ? WHERE rowid = ?"

WORKER_STATUS: Final = "SELECT status FROM workers WHERE partition_id = ? AND worker_id = ?"
BEAT_WORKER: Final = f"""
INSERT INTO workers (partition_id, worker_id, seq, status, last_heartbeat_time, heartbeat_stats)
VALUES (?, ?, {_next_order("workers")}, 'unknown', ?, ?)
ON CONFLICT (partition_id, worker_id) DO UPDATE SET last_heartbeat_time = excluded.last_heartbeat_time,
    heartbeat_stats = coalesce(excluded.heartbeat_stats, heartbeat_stats)
"""
# RETURNING would give whole seconds as integers.
WORKERS_BY_ID: Final = f"""
SELECT given.key, {_columns(WORKER_COLUMNS, "w")}
FROM json_each(?) AS given CROSS JOIN workers AS w ON w.partition_id = ? AND w.worker_id = given.value
"""

ROLLOUTS_BY_ID: Final = f"""
SELECT {_columns(ROLLOUT_COLUMNS, "r")}, {_columns(ATTEMPT_COLUMNS, "a")}
FROM json_each(?) AS given CROSS JOIN rollouts AS r ON r.partition_id = ? AND r.rollout_id = given.value
LEFT JOIN attempts AS a
ON a.partition_id = r.partition_id AND a.rollout_id = r.rollout_id AND a.sequence_id = r.attempt_count
"""
# The plus sign keeps the index on the status out of it.
FINISHED_BY_ID: Final = f"""
{ROLLOUTS_BY_ID} WHERE +r.status IN ({", ".join(repr(status) for status in sorted(ROLLOUT_FINISHED))})
"""
IS_ATTEMPT: Final = "SELECT 1 FROM attempts WHERE partition_id = ? AND rollout_id = ? AND attempt_id = ?"
IS_SPAN: Final = "SELECT 1 FROM spans WHERE partition_id = ? AND rollout_id = ? AND attempt_id = ? AND span_id = ?"


@cache  # for each of the few sets of fields that change together
def worker_statements(fields: tuple[str, ...]) -> tuple[str, str]:
    """To change these fields of a worker, and to make up a worker with them; both take them and the worker's key."""
    names = [word(field) for field in fields]
    settings = ", ".join(f"{name} = ?" for name in names)
    status = ("", "") if "status" in fields else (", status", ", 'unknown'")
    update = f"UPDATE workers SET {settings} WHERE partition_id = ? AND worker_id = ?"
    insert = (
        f"INSERT INTO workers ({', '.join(names)}, partition_id, worker_id, seq{status[0]}) "
        f"VALUES ({'?, ' * len(fields)}?, ?, {_next_order('workers')}{status[1]}) ON CONFLICT DO NOTHING"
    )
    return update, insert
