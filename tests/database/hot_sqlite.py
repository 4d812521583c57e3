"""What the tests of SQLite's hot path share: an empty database, calls with little to say, looks at what is stored."""

import secrets
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, create_engine, literal_column, select
from sqlalchemy.engine import URL, make_url

from lightning_sql.database import native
from lightning_sql.database.dialects.hot import AttemptChange, Claim, HotPath, RolloutDraft, SpanBatch, SpanDraft
from lightning_sql.database.dialects.sqlite import SQLite
from lightning_sql.database.schema import PARTITION

NOW = 1_700_000_000.0


def create(file: Path) -> URL:
    """An empty database with the native store's tables."""
    engine = create_engine(f"sqlite+pysqlite:///{file}")
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        native.ROLLOUTS.metadata.create_all(connection, tables=native.TABLES)
    engine.dispose()
    return make_url(f"sqlite:///{file}?synchronous=NORMAL")


def path_to(url: URL, partition: str = "p") -> HotPath:
    dialect = SQLite()
    return dialect.hot_path(url, dialect.engines(url), partition)


def draft(rollout_id: str, **fields: Any) -> RolloutDraft:
    plain = RolloutDraft(rollout_id, '{"a":1}', None, None, None, None, 1, "[]", "{}")
    return plain._replace(**fields)


def claim(*attempt_ids: str, worker: str | None = None) -> Claim:
    return Claim(worker, attempt_ids)


def span(rollout_id: str, attempt_id: str, span_id: str, number: int = 1, **fields: Any) -> SpanDraft:
    plain = SpanDraft(
        rollout_id,
        attempt_id,
        number,
        "t",
        span_id,
        None,
        "name",
        '{"status_code":"OK"}',
        "{}",
        "[]",
        "[]",
        1.0,
        2.0,
        None,
        None,
        '{"attributes":{},"schema_url":""}',
        None,
    )
    return plain._replace(**fields)


def batch(*spans: SpanDraft, strict: bool = True) -> SpanBatch:
    return SpanBatch(spans, strict)


def change(rollout_id: str, attempt_id: str | None, **fields: Any) -> AttemptChange:
    return AttemptChange(rollout_id, attempt_id, None, None, None, None)._replace(**fields)


async def begun(hot: HotPath, rollout_id: str, attempt_id: str, *, worker: str | None = None, **fields: Any) -> None:
    """Enqueue a rollout and claim it; the queue must be empty."""
    await hot.enqueue([draft(rollout_id, **fields)], NOW)
    _, [[row]] = await hot.claim([claim(attempt_id, worker=worker)], NOW)
    assert row[0] == rollout_id


async def stored(hot: HotPath, table: Table, *columns: str, partition: str = "p", order: str = "rowid") -> list[Any]:
    """Rows of a table, or the values of a single column, in the order of insertion."""
    statement = select(*native.raw_columns(table, columns)).where(table.c[PARTITION] == partition)

    def rows(connection: Connection) -> list[Any]:
        found = connection.execute(statement.order_by(literal_column(order))).all()
        return [row[0] if len(columns) == 1 else tuple(row) for row in found]

    return await hot.read(rows)


async def queued(hot: HotPath, partition: str = "p") -> list[str]:
    """The queue, from its front."""
    positions = await stored(
        hot, native.ROLLOUTS, "rollout_id", "queue_position", partition=partition, order="queue_position"
    )
    return [rollout_id for rollout_id, position in positions if position is not None]


def fresh_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(6)}"
