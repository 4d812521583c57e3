"""The tables of the native store, on which the server runs from here on, and in them all that it stored before.

Up copies every partition from the tables of the storage protocols and leaves those as they are. Down
replaces there what the native tables hold too. Payloads go from table to table inside the database, as
text; the limits of rollouts and, on the way down, the queue pass through Python in batches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
JSON = sa.Text().with_variant(sa.JSON(), "postgresql")

NATIVE = ("rollouts", "attempts", "spans", "span_sequences", "resources", "workers")
PROTOCOL = (
    "collection_rollouts",
    "collection_attempts",
    "collection_spans",
    "collection_resources",
    "collection_workers",
    "collection_rollout_queue",
    "collection_span_sequence_ids",
)
COUNTED = ("rollouts", "spans", "resources", "workers")
"""Those whose insertions a sequence counts, on PostgreSQL."""


def upgrade() -> None:
    create_tables()
    if not on_postgresql():
        create_indexes()  # to make one of what is there, SQLite would sort it in memory
    lock(PROTOCOL)
    copy_attempts_up()
    for name in ("spans", "resources", "workers"):
        copy_up(name)
    copy_counters_up()
    copy_rollouts_up()
    if on_postgresql():
        create_indexes()
        for name in COUNTED:
            op.execute(CreateSequence(sa.Sequence(f"{name}_order")))
            advance(name)
        # A plan made for an empty table stays bad for a full one.
        op.execute(f"ANALYZE {', '.join(NATIVE)}")


def downgrade() -> None:
    lock(NATIVE, "ACCESS EXCLUSIVE")
    lock(PROTOCOL)
    for name in ORDERS:
        copy_down(name)
    copy_counters_down()
    copy_queue_down()
    copy_rollouts_down()
    if on_postgresql():
        for name in COUNTED:
            op.execute(DropSequence(sa.Sequence(f"{name}_order")))
    for name in reversed(NATIVE):
        drop(name)


def create_tables() -> None:
    # HOT updates need room on the page of the row that they replace.
    updated: dict[str, Any] = {"postgresql_with": {"fillfactor": 80}}
    op.create_table(
        "rollouts",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("mode", TEXT, nullable=True),
        sa.Column("resources_id", TEXT, nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("timeout_seconds", sa.Double(), nullable=True),
        sa.Column("unresponsive_seconds", sa.Double(), nullable=True),
        sa.Column("max_attempts", sa.BigInteger(), nullable=False),
        sa.Column("retry_condition", TEXT, nullable=False),
        sa.Column("queue_position", sa.BigInteger(), nullable=True),
        sa.Column("attempt_count", sa.BigInteger(), nullable=False),
        sa.Column("watch_at", sa.Double(), nullable=True),
        sa.Column("input", JSON, nullable=True),
        sa.Column("metadata", JSON, nullable=True),
        sa.PrimaryKeyConstraint("partition_id", "rollout_id", name=op.f("pk_rollouts")),
        sa.CheckConstraint(
            "(status IN ('queuing', 'requeuing')) = (queue_position IS NOT NULL)", name=op.f("ck_rollouts_queued")
        ),
        **updated,
    )
    op.create_table(
        "attempts",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("sequence_id", sa.BigInteger(), nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("metadata", JSON, nullable=True),
        sa.PrimaryKeyConstraint("partition_id", "rollout_id", "attempt_id", name=op.f("pk_attempts")),
        sa.UniqueConstraint(
            "partition_id", "rollout_id", "sequence_id", name=op.f("uq_attempts_partition_id_rollout_id_sequence_id")
        ),
        **updated,
    )
    op.create_table(
        "spans",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("span_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("sequence_id", sa.BigInteger(), nullable=False),
        sa.Column("trace_id", TEXT, nullable=False),
        sa.Column("parent_id", TEXT, nullable=True),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("status", JSON, nullable=False),
        sa.Column("attributes", JSON, nullable=False),
        sa.Column("events", JSON, nullable=False),
        sa.Column("links", JSON, nullable=False),
        sa.Column("context", JSON, nullable=True),
        sa.Column("parent", JSON, nullable=True),
        sa.Column("resource", JSON, nullable=False),
        sa.Column("extra", JSON, nullable=True),
        sa.PrimaryKeyConstraint("partition_id", "rollout_id", "attempt_id", "span_id", name=op.f("pk_spans")),
    )
    op.create_table(
        "span_sequences",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition_id", "rollout_id", name=op.f("pk_span_sequences")),
        **updated,
    )
    op.create_table(
        "resources",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("resources_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("update_time", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("resources", JSON, nullable=False),
        sa.PrimaryKeyConstraint("partition_id", "resources_id", name=op.f("pk_resources")),
    )
    op.create_table(
        "workers",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("heartbeat_stats", JSON, nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("last_dequeue_time", sa.Double(), nullable=True),
        sa.Column("last_busy_time", sa.Double(), nullable=True),
        sa.Column("last_idle_time", sa.Double(), nullable=True),
        sa.Column("current_rollout_id", TEXT, nullable=True),
        sa.Column("current_attempt_id", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("partition_id", "worker_id", name=op.f("pk_workers")),
        **updated,
    )


def create_indexes() -> None:
    def only(condition: str) -> dict[str, Any]:
        return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}

    newest = ["partition_id", "status", sa.text("start_time DESC"), "seq"]
    queued, watched = only("queue_position IS NOT NULL"), only("watch_at IS NOT NULL")
    op.create_index(op.f("ix_rollouts_partition_id_seq"), "rollouts", ["partition_id", "seq"], unique=True)
    op.create_index(op.f("ix_rollouts_status_newest"), "rollouts", newest)
    op.create_index(op.f("ix_rollouts_queue"), "rollouts", ["partition_id", "queue_position"], **queued)
    op.create_index(op.f("ix_rollouts_watch"), "rollouts", ["partition_id", "watch_at"], **watched)
    op.create_index(op.f("ix_spans_sequence"), "spans", ["partition_id", "rollout_id", "sequence_id", "seq"])
    op.create_index(op.f("ix_resources_partition_id_update_time"), "resources", ["partition_id", "update_time"])


# What differs between the dialects


def on_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def lock(names: Sequence[str], mode: str = "SHARE ROW EXCLUSIVE") -> None:
    """Let nobody write behind the copy's back. On SQLite the transaction has locked everything."""
    if on_postgresql():
        op.execute(f"LOCK TABLE {', '.join(names)} IN {mode} MODE")


def drop(name: str) -> None:
    """Drop a table. SQLite keeps in memory what a DROP takes away, but not what a DELETE does."""
    if not on_postgresql():
        op.execute(sa.delete(sa.table(name)))
    op.drop_table(name)


def text_of(item: Any) -> Any:
    """The text that a column of JSON strings stands for."""
    return item.op("#>>")(sa.literal_column("'{}'")) if on_postgresql() else sa.func.json_extract(item, "$")


def advance(name: str) -> None:
    """Let the sequence of a table go on after every number that is in use."""
    numbers = ("seq", "queue_position") if name == "rollouts" else ("seq",)
    numbered = table(name, *numbers)
    highest = sa.func.greatest(*(sa.func.max(numbered.c[number]) for number in numbers))
    sequence = sa.literal_column(f"'{name}_order'")
    op.execute(sa.select(sa.func.setval(sequence, sa.func.coalesce(highest, 1), highest.is_not(None))))


# Records that are the same on both sides


ORDERS = {
    "attempts": ("partition_id", "rollout_id", "sequence_id"),
    "spans": ("partition_id", "rollout_id", "seq"),
    "resources": ("partition_id", "seq"),
    "workers": ("partition_id", "seq"),
}
"""In what order records go down, where they are numbered anew: the one in which they are asked for, which
nobody does across partitions, nor for the attempts or spans of several rollouts."""
BATCH = 2_000
MOST_DELETED = 100_000
PROTOCOL_NAMES = {"extra": "extra_fields"}
TYPES = {"partition_id": TEXT, "rollout_id": TEXT, "seq": sa.BigInteger(), "queue_position": sa.BigInteger()}


def table(name: str, *columns: str) -> Any:
    return sa.table(name, *(sa.column(column, TYPES.get(column)) for column in columns))


def both(name: str) -> tuple[Any, Any, list[tuple[str, str]]]:
    """A native table, that of the protocols, and the columns that they have in common, as each names them."""
    names = [column["name"] for column in sa.inspect(op.get_bind()).get_columns(name)]
    pairs = [(column, PROTOCOL_NAMES.get(column, column)) for column in names]
    return table(name, *names), table(f"collection_{name}", *(other for _, other in pairs)), pairs


def copy_up(name: str) -> None:
    new, old, pairs = both(name)
    copy(old, new, [(old.c[other], column) for column, other in pairs])


def copy_down(name: str) -> None:
    new, old, pairs = both(name)
    key = sa.inspect(op.get_bind()).get_pk_constraint(name)["constrained_columns"]
    remove(old, new, [new.c[column] == old.c[column] for column in key])
    columns = [(new.c[column], other) for column, other in pairs if column != "seq"]
    order = [new.c[column] for column in ORDERS[name]]
    for part in parts(*order[:2]):
        copy(new, old, columns, *order, where=part)


def copy(source: Any, target: Any, columns: Sequence[tuple[Any, str]], *order: Any, where: Any = None) -> None:
    """Insert rows of a source into a table: pairs of an expression and the column that takes it."""
    rows = sa.select(*(expression for expression, _ in columns)).select_from(source).order_by(*order)
    if where is not None:
        rows = rows.where(where)
    op.execute(sa.insert(target).from_select([name for _, name in columns], rows))


def parts(*key: Any) -> Iterator[Any]:
    """Conditions that part a table, along a key; what has the same key stays together.

    SQLite keeps in memory what a statement overwrites, and copies on the way down overwrite what they replace.
    """
    rest, after = sa.select(*key).order_by(*key), sa.true()
    while end := op.get_bind().execute(rest.where(after).offset(BATCH).limit(1)).all():
        last = values_of(end[0], key)
        yield sa.and_(after, sa.tuple_(*key) <= last)
        after = sa.tuple_(*key) > last
    yield after


def values_of(row: Any, key: Sequence[Any]) -> Any:
    return sa.tuple_(*(sa.literal(value, column.type) for value, column in zip(row, key, strict=False)))


def remove(old: Any, new: Any, same: Sequence[Any]) -> None:
    """Delete what a native table holds too, by conditions that say what is the same."""
    statement = sa.delete(old).where(sa.exists().select_from(new).where(*same))
    if on_postgresql():
        op.execute(statement)
        return
    # SQLite remembers which rows it is about to delete.
    seq = sa.column("seq", sa.BigInteger())
    last = op.get_bind().execute(sa.select(sa.func.max(seq)).select_from(old)).scalar_one() or 0
    for first in range(1, last + 1, MOST_DELETED):
        op.execute(statement.where(seq.between(first, first + MOST_DELETED - 1)))


def copy_attempts_up() -> None:
    connection = op.get_bind()
    try:
        with connection.begin_nested():
            copy_up("attempts")
    except IntegrityError:
        # Only the server's own rules kept two attempts of a rollout from having the same number.
        attempts = table("collection_attempts", "partition_id", "rollout_id", "sequence_id")
        repeated = sa.select(attempts).group_by(*attempts.c).having(sa.func.count() > 1).limit(1)
        found = connection.execute(repeated).mappings().first()
        if found is None:
            raise
        raise CommandError(
            f"attempts of rollout {found['rollout_id']!r} in partition {found['partition_id']!r} share the number "
            f"{found['sequence_id']}: make sequence_id unique within each rollout of collection_attempts first"
        ) from None


# Counters


def copy_counters_up() -> None:
    old = table("collection_span_sequence_ids", "partition_id", "key", "integer")
    new = table("span_sequences", "partition_id", "rollout_id", "value")
    op.execute(sa.insert(new).from_select(list(new.c.keys()), sa.select(old).where(old.c.integer.is_not(None))))


def copy_counters_down() -> None:
    old = table("collection_span_sequence_ids", "partition_id", "key", "integer")
    new = table("span_sequences", "partition_id", "rollout_id", "value")
    remove(old, new, [new.c.partition_id == old.c.partition_id, new.c.rollout_id == old.c.key])
    for part in parts(new.c.partition_id, new.c.rollout_id):
        columns = [(new.c.partition_id, "partition_id"), (new.c.rollout_id, "key"), (new.c.value, "integer")]
        copy(new, old, columns, where=part)


# Rollouts

QUEUED = ("queuing", "requeuing")
ACTIVE = ("preparing", "running")

SAME = ("partition_id", "rollout_id", "status", "mode", "resources_id", "start_time", "end_time", "input", "metadata")
LIMITS = ("timeout_seconds", "unresponsive_seconds", "max_attempts", "retry_condition")
NO_LIMITS = (None, None, 1, "[]")
"""Of most rollouts, so only others pass through Python."""
NO_LIMITS_CONFIG = '{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]}'

# How infinities stand in JSON, which has none. That something is not a number limits nothing.
NON_FINITE = {"\x1aInfinity": math.inf, "\x1a-Infinity": -math.inf, "\x1aNaN": None}
NAMES = {math.inf: "\x1aInfinity", -math.inf: "\x1a-Infinity"}


def batches(rows: sa.Select[*tuple[Any, ...]], *key: Any) -> Iterator[Sequence[Any]]:
    """The rows of a select in the order of its first columns, which are unique together."""
    page = rows
    while found := op.get_bind().execute(page.order_by(*key).limit(BATCH)).all():
        yield found
        page = rows.where(sa.tuple_(*key) > values_of(found[-1], key))


def compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def limits_of(config: str) -> dict[str, Any]:
    """The columns of a config document; what it leaves out has its default."""
    document = json.loads(config) or {}

    def seconds(name: str) -> float | None:
        value = document.get(name)
        return NON_FINITE[value] if isinstance(value, str) else None if value is None else float(value)

    return {
        "timeout_seconds": seconds("timeout_seconds"),
        "unresponsive_seconds": seconds("unresponsive_seconds"),
        "max_attempts": document.get("max_attempts", 1),
        "retry_condition": compact(document.get("retry_condition", [])),
    }


def config_of(limits: Sequence[Any]) -> str:
    timeout, unresponsive, attempts, condition = limits
    values = (NAMES.get(timeout, timeout), NAMES.get(unresponsive, unresponsive), attempts, json.loads(condition))
    return compact(dict(zip(LIMITS, values, strict=True)))


def same_rollout(one: Any, other: Any) -> tuple[Any, Any]:
    return one.c.partition_id == other.c.partition_id, one.c.rollout_id == other.c.rollout_id


def stage_limits(old: Any) -> Any:
    """A table of the configs that are no default ones, as columns."""
    limits = op.create_table(
        "rollout_limits",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("timeout_seconds", sa.Double()),
        sa.Column("unresponsive_seconds", sa.Double()),
        sa.Column("max_attempts", sa.BigInteger()),
        sa.Column("retry_condition", sa.Text()),
    )
    config = sa.cast(old.c.config, sa.Text)
    for rows in batches(sa.select(old.c.seq, config).where(config != NO_LIMITS_CONFIG), old.c.seq):
        op.bulk_insert(limits, [{"seq": seq} | limits_of(text) for seq, text in rows])
    return limits


def stage_entries(old: Any) -> Any:
    """A table of the queue's entries for rollouts that are queued; what else the queue may hold is stale."""
    entries = op.create_table(
        "rollout_entries",
        sa.Column("partition_id", TEXT, primary_key=True),
        sa.Column("rollout_id", TEXT, primary_key=True),
        sa.Column("seq", sa.BigInteger(), primary_key=True),
    )
    queue = table("collection_rollout_queue", "partition_id", "seq", "item")
    named = sa.and_(queue.c.partition_id == old.c.partition_id, text_of(queue.c.item) == old.c.rollout_id)
    copy(
        queue.join(old, sa.and_(named, old.c.status.in_(QUEUED))),
        entries,
        [(old.c.partition_id, "partition_id"), (old.c.rollout_id, "rollout_id"), (queue.c.seq, "seq")],
    )
    return entries


def copy_rollouts_up() -> None:
    old = table("collection_rollouts", *SAME, "seq", "config")
    new = table("rollouts", *SAME, *LIMITS, "seq", "queue_position", "attempt_count", "watch_at")
    limits, entries = stage_limits(old), stage_entries(old)
    attempts = table("attempts", "partition_id", "rollout_id", "sequence_id")
    latest = sa.select(sa.func.max(attempts.c.sequence_id)).where(*same_rollout(attempts, old)).scalar_subquery()
    place = sa.select(sa.func.min(entries.c.seq)).where(*same_rollout(entries, old)).scalar_subquery()
    last_place = sa.select(sa.func.coalesce(sa.func.max(entries.c.seq), 0)).scalar_subquery()
    # One without an entry goes to the end, as if it was queued only now.
    position = sa.func.coalesce(place, last_place + old.c.seq)
    limited = sa.or_(limits.c.timeout_seconds.is_not(None), limits.c.unresponsive_seconds.is_not(None))
    now = sa.literal(0.0, sa.Double())  # the watchdog looks at once, and then knows better
    columns = [
        *((old.c[name], name) for name in (*SAME, "seq")),
        (limits.c.timeout_seconds, "timeout_seconds"),
        (limits.c.unresponsive_seconds, "unresponsive_seconds"),
        (sa.func.coalesce(limits.c.max_attempts, 1), "max_attempts"),
        (sa.func.coalesce(limits.c.retry_condition, "[]"), "retry_condition"),
        (sa.case((old.c.status.in_(QUEUED), position)), "queue_position"),
        (sa.func.coalesce(latest, 0), "attempt_count"),
        (sa.case((sa.and_(old.c.status.in_(ACTIVE), limited), now)), "watch_at"),
    ]
    copy(old.outerjoin(limits, limits.c.seq == old.c.seq), new, columns)
    drop("rollout_entries")
    drop("rollout_limits")


def stage_configs(new: Any) -> Any:
    """A table of the config documents that are no default ones."""
    configs = op.create_table(
        "rollout_configs",
        sa.Column("partition_id", TEXT, primary_key=True),
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("config", sa.Text(), nullable=False),
    )
    key, limits = (new.c.partition_id, new.c.seq), [new.c[name] for name in LIMITS]
    limited = sa.or_(*(column.is_distinct_from(value) for column, value in zip(limits, NO_LIMITS, strict=True)))
    for rows in batches(sa.select(*key, *limits).where(limited), *key):
        op.bulk_insert(configs, [{"partition_id": row[0], "seq": row[1], "config": config_of(row[2:])} for row in rows])
    return configs


def copy_rollouts_down() -> None:
    old = table("collection_rollouts", *SAME, "config")
    new = table("rollouts", *SAME, *LIMITS, "seq")
    configs = stage_configs(new)
    remove(old, new, same_rollout(new, old))
    config = sa.cast(sa.func.coalesce(configs.c.config, NO_LIMITS_CONFIG), JSON)
    of_rollout = sa.and_(configs.c.partition_id == new.c.partition_id, configs.c.seq == new.c.seq)
    columns = [*((new.c[name], name) for name in SAME), (config, "config")]
    key = (new.c.partition_id, new.c.seq)
    for part in parts(*key):
        copy(new.outerjoin(configs, of_rollout), old, columns, *key, where=part)
    drop("rollout_configs")


def copy_queue_down() -> None:
    old = table("collection_rollout_queue", "partition_id", "digest", "item")
    new = table("rollouts", "partition_id", "queue_position", "rollout_id")
    remove(old, new, [new.c.partition_id == old.c.partition_id, new.c.rollout_id == text_of(old.c.item)])
    entry = sa.insert(old).values(item=sa.cast(sa.bindparam("item", type_=sa.Text()), JSON))
    key = (new.c.partition_id, new.c.queue_position, new.c.rollout_id)
    for rows in batches(sa.select(*key).where(new.c.queue_position.is_not(None)), *key):
        entries = [
            {"partition_id": partition, "digest": digest_of(stored), "item": compact(stored)}
            for partition, _, stored in rows
        ]
        op.get_bind().execute(entry, entries)


ESCAPED = re.compile("\x1a([\x01-\x10]{4})")


def digest_of(stored: str) -> str:
    """The digest under which the queue of the protocols finds an id."""

    def character(code: re.Match[str]) -> str:
        return chr(int("".join(f"{ord(digit) - 1:x}" for digit in code[1]), 16))

    # Text that begins with U+001A stands in its column escaped, which the digest does not know.
    rollout_id = ESCAPED.sub(character, stored[1:]) if stored.startswith("\x1a") else stored
    return sha256(json.dumps(rollout_id).encode()).hexdigest()
