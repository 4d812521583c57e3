"""The tables of the storage protocols."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
JSON = sa.Text().with_variant(sa.JSON(), "postgresql")
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "collection_attempts",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("sequence_id", sa.BigInteger(), nullable=True),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("status", TEXT, nullable=True),
        sa.Column("worker_id", TEXT, nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("metadata", JSON, nullable=True),
        sa.Column("extra_fields", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_attempts")),
        sa.UniqueConstraint(
            "partition_id",
            "rollout_id",
            "attempt_id",
            name=op.f("uq_collection_attempts_partition_id_rollout_id_attempt_id"),
        ),
    )
    op.create_table(
        "collection_resources",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("resources_id", TEXT, nullable=False),
        sa.Column("create_time", sa.Double(), nullable=True),
        sa.Column("update_time", sa.Double(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("resources", JSON, nullable=True),
        sa.Column("extra_fields", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_resources")),
        sa.UniqueConstraint(
            "partition_id", "resources_id", name=op.f("uq_collection_resources_partition_id_resources_id")
        ),
    )
    op.create_index(
        op.f("ix_collection_resources_partition_id_update_time"),
        "collection_resources",
        ["partition_id", "update_time"],
        unique=False,
    )
    op.create_table(
        "collection_rollout_queue",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("item", JSON, nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_rollout_queue")),
    )
    op.create_index(
        op.f("ix_collection_rollout_queue_partition_id_digest"),
        "collection_rollout_queue",
        ["partition_id", "digest"],
        unique=False,
    )
    op.create_index(
        op.f("ix_collection_rollout_queue_partition_id_seq"),
        "collection_rollout_queue",
        ["partition_id", "seq"],
        unique=False,
    )
    op.create_table(
        "collection_rollouts",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("input", JSON, nullable=True),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("mode", TEXT, nullable=True),
        sa.Column("resources_id", TEXT, nullable=True),
        sa.Column("status", TEXT, nullable=True),
        sa.Column("config", JSON, nullable=True),
        sa.Column("metadata", JSON, nullable=True),
        sa.Column("extra_fields", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_rollouts")),
        sa.UniqueConstraint("partition_id", "rollout_id", name=op.f("uq_collection_rollouts_partition_id_rollout_id")),
    )
    op.create_index(
        op.f("ix_collection_rollouts_partition_id_seq"), "collection_rollouts", ["partition_id", "seq"], unique=False
    )
    op.create_index(
        op.f("ix_collection_rollouts_partition_id_status_seq"),
        "collection_rollouts",
        ["partition_id", "status", "seq"],
        unique=False,
    )
    op.create_table(
        "collection_span_sequence_ids",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("integer", sa.BigInteger(), nullable=True),
        sa.Column("real", sa.Double(), nullable=True),
        sa.Column("document", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_span_sequence_ids")),
        sa.UniqueConstraint("partition_id", "key", name=op.f("uq_collection_span_sequence_ids_partition_id_key")),
    )
    op.create_table(
        "collection_spans",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("sequence_id", sa.BigInteger(), nullable=True),
        sa.Column("trace_id", TEXT, nullable=True),
        sa.Column("span_id", TEXT, nullable=False),
        sa.Column("parent_id", TEXT, nullable=True),
        sa.Column("name", TEXT, nullable=True),
        sa.Column("status", JSON, nullable=True),
        sa.Column("attributes", JSON, nullable=True),
        sa.Column("events", JSON, nullable=True),
        sa.Column("links", JSON, nullable=True),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("context", JSON, nullable=True),
        sa.Column("parent", JSON, nullable=True),
        sa.Column("resource", JSON, nullable=True),
        sa.Column("extra_fields", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_spans")),
        sa.UniqueConstraint(
            "partition_id",
            "rollout_id",
            "attempt_id",
            "span_id",
            name=op.f("uq_collection_spans_partition_id_rollout_id_attempt_id_span_id"),
        ),
    )
    op.create_table(
        "collection_workers",
        sa.Column("seq", NUMBER, autoincrement=True, nullable=False),
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("status", TEXT, nullable=True),
        sa.Column("heartbeat_stats", JSON, nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("last_dequeue_time", sa.Double(), nullable=True),
        sa.Column("last_busy_time", sa.Double(), nullable=True),
        sa.Column("last_idle_time", sa.Double(), nullable=True),
        sa.Column("current_rollout_id", TEXT, nullable=True),
        sa.Column("current_attempt_id", TEXT, nullable=True),
        sa.Column("extra_fields", JSON, nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_collection_workers")),
        sa.UniqueConstraint("partition_id", "worker_id", name=op.f("uq_collection_workers_partition_id_worker_id")),
    )


def downgrade() -> None:
    op.drop_table("collection_workers")
    op.drop_table("collection_spans")
    op.drop_table("collection_span_sequence_ids")
    op.drop_index(op.f("ix_collection_rollouts_partition_id_status_seq"), table_name="collection_rollouts")
    op.drop_index(op.f("ix_collection_rollouts_partition_id_seq"), table_name="collection_rollouts")
    op.drop_table("collection_rollouts")
    op.drop_index(op.f("ix_collection_rollout_queue_partition_id_seq"), table_name="collection_rollout_queue")
    op.drop_index(op.f("ix_collection_rollout_queue_partition_id_digest"), table_name="collection_rollout_queue")
    op.drop_table("collection_rollout_queue")
    op.drop_index(op.f("ix_collection_resources_partition_id_update_time"), table_name="collection_resources")
    op.drop_table("collection_resources")
    op.drop_table("collection_attempts")
