"""The tables.

`collection_*` serve the storage protocols: one column for each field of the items, no derived columns,
no foreign keys. Every table leads with `partition_id`, which isolates the runs that share a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel
from sqlalchemy import Column, Index, MetaData, Table, UniqueConstraint

from lightning_sql.database.dialects.types import AUTO_NUMBER
from lightning_sql.database.types import COLUMN_TYPES, ExactText, Integer64, Payload, Real
from lightning_sql.errors import ConfigurationError
from lightning_sql.fields import field_kinds
from lightning_sql.records import Attempt, ResourcesUpdate, Rollout, Span, Worker

__all__ = [
    "ATTEMPTS",
    "COUNTERS",
    "EXTRA",
    "PARTITION",
    "QUEUE",
    "RESOURCES",
    "ROLLOUTS",
    "SEQ",
    "SPANS",
    "WORKERS",
    "collection_table",
    "key_value_table",
    "metadata",
    "queue_table",
]

PARTITION: Final = "partition_id"
SEQ: Final = "seq"
"""The insertion order."""
EXTRA: Final = "extra_fields"
"""What an item holds beyond the columns: the extra fields of its model, and declared ones without a column."""

metadata: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _seq() -> Column[int]:
    return Column(SEQ, AUTO_NUMBER, primary_key=True, autoincrement=True)


def _partition() -> Column[str]:
    return Column(PARTITION, ExactText, nullable=False)


def collection_table(name: str, item_type: type[BaseModel], primary_keys: Sequence[str], metadata: MetaData) -> Table:
    """A table for a collection of any pydantic items.

    Raises:
        ConfigurationError: a field has the name of one of the table's own columns.
    """
    kinds = field_kinds(item_type)
    taken = {PARTITION, SEQ, EXTRA}.intersection(kinds)
    if taken:
        raise ConfigurationError(f"{item_type.__name__}.{taken.pop()} has the name of a column of the store's own")
    return Table(
        name,
        metadata,
        _seq(),
        _partition(),
        *(Column(field, COLUMN_TYPES[kind], nullable=field not in primary_keys) for field, kind in kinds.items()),
        Column(EXTRA, Payload),
        UniqueConstraint(PARTITION, *primary_keys),
    )


def queue_table(name: str, metadata: MetaData) -> Table:
    """A table for a queue of strings or pydantic items; `digest` is equal for equal items."""
    table = Table(
        name,
        metadata,
        _seq(),
        _partition(),
        Column("digest", ExactText, nullable=False),
        Column("item", Payload, nullable=False),
    )
    Index(None, table.c[PARTITION], table.c[SEQ])  # the front of the queue
    Index(None, table.c[PARTITION], table.c.digest)  # is it queued; take it out
    return table


def key_value_table(name: str, metadata: MetaData) -> Table:
    """A table for a key-value store: a value is an integer, a real, or any other JSON."""
    return Table(
        name,
        metadata,
        _seq(),
        _partition(),
        Column("key", ExactText, nullable=False),
        Column("integer", Integer64),
        Column("real", Real),
        Column("document", Payload),
        UniqueConstraint(PARTITION, "key"),
    )


ROLLOUTS: Final = collection_table("collection_rollouts", Rollout, ["rollout_id"], metadata)
ATTEMPTS: Final = collection_table("collection_attempts", Attempt, ["rollout_id", "attempt_id"], metadata)
SPANS: Final = collection_table("collection_spans", Span, ["rollout_id", "attempt_id", "span_id"], metadata)
RESOURCES: Final = collection_table("collection_resources", ResourcesUpdate, ["resources_id"], metadata)
WORKERS: Final = collection_table("collection_workers", Worker, ["worker_id"], metadata)
QUEUE: Final = queue_table("collection_rollout_queue", metadata)
COUNTERS: Final = key_value_table("collection_span_sequence_ids", metadata)

Index(None, ROLLOUTS.c[PARTITION], ROLLOUTS.c[SEQ])  # pages in order of creation
Index(None, ROLLOUTS.c[PARTITION], ROLLOUTS.c.status, ROLLOUTS.c[SEQ])  # pages by status; what the watchdog looks at
Index(None, RESOURCES.c[PARTITION], RESOURCES.c.update_time)  # the latest resources
