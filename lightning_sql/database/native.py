"""The tables of the native store.

Every table leads with `partition_id`, in its key and in every statement: it isolates the runs that
share a database. No foreign keys: existence is checked by the statement that needs it. Times are float
seconds since the epoch. Payloads are JSON text, as `lightning_sql.database.payload` writes it. Each
index says which query it serves.
"""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any, Final

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    FromClause,
    Index,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    cast,
    type_coerce,
)

from lightning_sql.database.schema import PARTITION, SEQ, metadata
from lightning_sql.database.types import ExactText, Integer64, Payload, Real
from lightning_sql.records import ROLLOUT_QUEUED

__all__ = [
    "ATTEMPTS",
    "ATTEMPT_COLUMNS",
    "IDEMPOTENCY_KEYS",
    "ORDERS",
    "RESOURCES",
    "RESOURCES_COLUMNS",
    "ROLLOUTS",
    "ROLLOUT_COLUMNS",
    "SPANS",
    "SPAN_COLUMNS",
    "SPAN_SEQUENCES",
    "SPLICED_SPAN_COLUMNS",
    "SPLICES",
    "TABLES",
    "WORKERS",
    "WORKER_COLUMNS",
    "raw_columns",
]

# HOT updates need room on the page of the row that they replace.
_UPDATED: Final[dict[str, Any]] = {"postgresql_with": {"fillfactor": 80}}


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, ExactText, nullable=null)


def _integer(name: str, *, null: bool = False, **options: Any) -> Column[int]:
    return Column(name, Integer64, nullable=null, **options)


def _time(name: str, *, null: bool = True) -> Column[float]:
    return Column(name, Real, nullable=null)


def _payload(name: str, *, null: bool = True, inside: int = 0) -> Column[Any]:
    return Column(name, Payload(inside), nullable=null)


ROLLOUTS: Final = Table(
    "rollouts",
    metadata,
    _text(PARTITION),
    _text("rollout_id"),
    _integer(SEQ),
    _text("status"),
    _text("mode", null=True),
    _text("resources_id", null=True),
    _time("start_time", null=False),
    _time("end_time"),
    _time("timeout_seconds"),
    _time("unresponsive_seconds"),
    _integer("max_attempts"),
    _text("retry_condition"),
    _integer("queue_position", null=True),
    _integer("attempt_count"),
    _time("watch_at"),
    _payload("input"),
    _payload("metadata"),
    PrimaryKeyConstraint(PARTITION, "rollout_id"),
    CheckConstraint(
        f"(status IN ({', '.join(repr(status) for status in sorted(ROLLOUT_QUEUED))})) = (queue_position IS NOT NULL)",
        name="queued",
    ),
    **_UPDATED,
)
"""`queue_position` is set exactly while the status is a queued one; the smallest is the front of the queue.
`attempt_count` is the number of the latest attempt, 0 before the first. `watch_at` is the earliest time at
which the watchdog need look, a lower bound that heartbeats do not move; NULL unless active with a limit.
`retry_condition` is a JSON array of attempt statuses. `input` is NULL for null, `metadata` too."""

Index(None, ROLLOUTS.c[PARTITION], ROLLOUTS.c[SEQ], unique=True)  # pages in order of creation
Index(  # pages by status, newest first, and how many there are
    "ix_rollouts_status_newest",
    ROLLOUTS.c[PARTITION],
    ROLLOUTS.c.status,
    ROLLOUTS.c.start_time.desc(),
    ROLLOUTS.c[SEQ],
)
_queued = ROLLOUTS.c.queue_position.is_not(None)
Index(  # the front of the queue
    "ix_rollouts_queue",
    ROLLOUTS.c[PARTITION],
    ROLLOUTS.c.queue_position,
    postgresql_where=_queued,
    sqlite_where=_queued,
)
_watched = ROLLOUTS.c.watch_at.is_not(None)
Index(  # what the watchdog must look at
    "ix_rollouts_watch",
    ROLLOUTS.c[PARTITION],
    ROLLOUTS.c.watch_at,
    postgresql_where=_watched,
    sqlite_where=_watched,
)

ATTEMPTS: Final = Table(
    "attempts",
    metadata,
    _text(PARTITION),
    _text("rollout_id"),
    _text("attempt_id"),
    _integer("sequence_id"),
    _text("status"),
    _text("worker_id", null=True),
    _time("start_time", null=False),
    _time("end_time"),
    _time("last_heartbeat_time"),
    _payload("metadata"),
    PrimaryKeyConstraint(PARTITION, "rollout_id", "attempt_id"),
    UniqueConstraint(PARTITION, "rollout_id", "sequence_id"),  # law 5; the latest attempt
    **_UPDATED,
)

SPANS: Final = Table(
    "spans",
    metadata,
    _text(PARTITION),
    _text("rollout_id"),
    _text("attempt_id"),
    _text("span_id"),
    _integer(SEQ),
    _integer("sequence_id"),
    _text("trace_id"),
    _text("parent_id", null=True),
    _text("name"),
    _time("start_time"),
    _time("end_time"),
    _payload("status", null=False),
    _payload("attributes", null=False),
    _payload("events", null=False),
    _payload("links", null=False),
    _payload("context"),
    _payload("parent"),
    _payload("resource", null=False),
    _payload("extra"),
    PrimaryKeyConstraint(PARTITION, "rollout_id", "attempt_id", "span_id"),
)
"""`extra` is an object of the keys that the protocol does not name, NULL when there are none."""

Index(  # the spans of a rollout, in their order
    "ix_spans_sequence", SPANS.c[PARTITION], SPANS.c.rollout_id, SPANS.c.sequence_id, SPANS.c[SEQ]
)

SPAN_SEQUENCES: Final = Table(
    "span_sequences",
    metadata,
    _text(PARTITION),
    _text("rollout_id"),
    _integer("value"),
    PrimaryKeyConstraint(PARTITION, "rollout_id"),
    **_UPDATED,
)
"""The highest sequence number that was issued to, or stored with, a span of a rollout."""

RESOURCES: Final = Table(
    "resources",
    metadata,
    _text(PARTITION),
    _text("resources_id"),
    _integer(SEQ),
    _time("create_time", null=False),
    _time("update_time", null=False),
    _integer("version"),
    _payload("resources", null=False, inside=2),
    PrimaryKeyConstraint(PARTITION, "resources_id"),
)
Index(None, RESOURCES.c[PARTITION], RESOURCES.c.update_time)  # the latest resources

WORKERS: Final = Table(
    "workers",
    metadata,
    _text(PARTITION),
    _text("worker_id"),
    _integer(SEQ),
    _text("status"),
    _payload("heartbeat_stats"),
    _time("last_heartbeat_time"),
    _time("last_dequeue_time"),
    _time("last_busy_time"),
    _time("last_idle_time"),
    _text("current_rollout_id", null=True),
    _text("current_attempt_id", null=True),
    PrimaryKeyConstraint(PARTITION, "worker_id"),
    **_UPDATED,
)

IDEMPOTENCY_KEYS: Final = Table(
    "idempotency_keys",
    metadata,
    _text(PARTITION),
    _text("key"),
    _integer("part"),
    _text("route"),
    _text("fingerprint"),
    _text("ids"),
    _time("time", null=False),
    PrimaryKeyConstraint(PARTITION, "key", "part"),
)
"""What calls that may be repeated did. `ids` says which records a repeat is answered from, never their
contents: in JSON, an array of ids or of pairs of them, or a text with a digit for each span of a batch.
`part` numbers the pieces of a call that goes to the database in several."""

Index(None, IDEMPOTENCY_KEYS.c[PARTITION], IDEMPOTENCY_KEYS.c.time)  # what is old enough to go

TABLES: Final = (ROLLOUTS, ATTEMPTS, SPANS, SPAN_SEQUENCES, RESOURCES, WORKERS, IDEMPOTENCY_KEYS)

ORDERS: Final = {
    table.name: Sequence(f"{table.name}_order", metadata=metadata) for table in (ROLLOUTS, SPANS, RESOURCES, WORKERS)
}
"""Where a server counts insertions; queue positions come from that of `rollouts`."""

ROLLOUT_COLUMNS: Final = (
    "rollout_id",
    "input",
    "start_time",
    "end_time",
    "mode",
    "resources_id",
    "status",
    "timeout_seconds",
    "unresponsive_seconds",
    "max_attempts",
    "retry_condition",
    "metadata",
)
"""The columns of a rollout that a row of it has, in this order; likewise below."""

ATTEMPT_COLUMNS: Final = (
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "start_time",
    "end_time",
    "status",
    "worker_id",
    "last_heartbeat_time",
    "metadata",
)
SPAN_COLUMNS: Final = (
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "trace_id",
    "span_id",
    "parent_id",
    "name",
    "status",
    "attributes",
    "events",
    "links",
    "start_time",
    "end_time",
    "context",
    "parent",
    "resource",
    "extra",
)
SPLICED_SPAN_COLUMNS: Final = (
    *SPAN_COLUMNS[: SPAN_COLUMNS.index("status")],
    "payloads",
    "start_time",
    "end_time",
    "origin",
    "extra",
)
"""Those of a span that is only to be written as JSON: what stands side by side there is one column already.

`payloads` is `SPLICES["payloads"]` with their names between them, so that it can stand for the value of the
first; likewise `origin`."""
SPLICES: Final = {"payloads": ("status", "attributes", "events", "links"), "origin": ("context", "parent", "resource")}
WORKER_COLUMNS: Final = (
    "worker_id",
    "status",
    "heartbeat_stats",
    "last_heartbeat_time",
    "last_dequeue_time",
    "last_busy_time",
    "last_idle_time",
    "current_rollout_id",
    "current_attempt_id",
)
RESOURCES_COLUMNS: Final = ("resources_id", "create_time", "update_time", "version", "resources")


def raw_columns(source: FromClause, names: Names[str]) -> list[ColumnElement[Any]]:
    """Columns of a table, or of a subquery over one, as they are stored: texts and payloads undecoded."""
    return [_raw(source.c[name]) for name in names]


def _raw(column: ColumnElement[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, Payload):
        return cast(column, Text)  # not only here: a driver would decode JSON too
    return type_coerce(column, Text) if isinstance(column.type, ExactText) else column
