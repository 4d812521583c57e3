"""A table of what repeatable calls did, so that a repeat is answered and not done again.

The releases before it neither read nor write the table, so they go on working beside it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("partition_id", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("part", sa.BigInteger(), nullable=False),
        sa.Column("route", TEXT, nullable=False),
        sa.Column("fingerprint", TEXT, nullable=False),
        sa.Column("ids", TEXT, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("partition_id", "key", "part", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_partition_id_time"), "idempotency_keys", ["partition_id", "time"])


def downgrade() -> None:
    op.drop_table("idempotency_keys")
