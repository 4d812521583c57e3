"""No hot statement of SQLite's walks through a table, whatever its size and whatever the planner knows of it."""

import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.dialects import sqlite

from lightning_sql import lifecycle
from lightning_sql.database.dialects import sqlite_statements as statements
from lightning_sql.database.dialects.hot import HotPath, WorkerBeat
from lightning_sql.database.native import ROLLOUTS, SPANS, TABLES, WORKERS
from tests.database.hot_sqlite import NOW, batch, change, claim, create, draft, path_to, span

ORDERED = ("ix_rollouts_queue", "ix_resources_partition_id_update_time")
"""Indexes of which the first or last entry of a partition is wanted."""
WALK = re.compile(r"SCAN (?!given\b|CONSTANT ROW)|USE TEMP B-TREE")
WHOLE_PARTITION = re.compile(r"USING (?:COVERING )?INDEX (\w+) \(partition_id=\?\)")


@pytest.fixture(params=[0, 3, 1500])
async def hot(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HotPath]:
    """A database with so many rollouts, two thirds of them claimed, in each of two partitions."""
    url = create(tmp_path / "hot.db")
    for partition in ("p", "q"):
        hot = path_to(url, partition)
        names = [str(number) for number in range(request.param)]
        if names:
            await hot.enqueue([draft(name, timeout_seconds=5.0) for name in names], NOW)
            taken = names[: 2 * len(names) // 3]
            await hot.claim([claim(name, worker=f"w{name}") for name in taken], NOW)
            await hot.add_spans([batch(*(span(name, name, str(n), n) for n in range(3))) for name in taken], NOW)
            await hot.update_attempts([change(name, name, status="succeeded") for name in taken[::2]], NOW)
            await hot.beat_workers([WorkerBeat(f"v{name}", None) for name in names], NOW)
            with closing(sqlite3.connect(tmp_path / "hot.db")) as connection, connection:
                connection.executemany(
                    "INSERT INTO resources VALUES (?, ?, ?, ?, ?, 1, '{}')",
                    [(partition, name, number, NOW, NOW + number) for number, name in enumerate(names)],
                )
        await hot.close()
    hot = path_to(url)
    yield hot
    await hot.close()


def hot_statements(hot: HotPath) -> Iterator[str]:
    for name in statements.__all__:
        text = getattr(statements, name)
        if isinstance(text, str):
            yield text
    for changes in (
        lifecycle.worker_sync("running", "a", "b", NOW),
        lifecycle.worker_sync("failed", "a", "b", NOW),
        lifecycle.dequeue_sync(("a", "b"), "unknown", NOW),
        lifecycle.dequeue_sync(None, "idle", NOW),
        lifecycle.dequeue_sync(None, "busy", NOW),
    ):
        yield from statements.worker_statements(tuple(changes))
    for table in (ROLLOUTS, SPANS, WORKERS):
        yield str(select(hot.next_order(table)).compile(dialect=sqlite.dialect()))
    yield str(select(hot.next_queue_position()).compile(dialect=sqlite.dialect()))


@pytest.mark.parametrize("analyzed", [False, True])
async def test_every_statement_searches(hot: HotPath, tmp_path: Path, analyzed: bool) -> None:
    explained = 0
    with closing(sqlite3.connect(tmp_path / "hot.db")) as connection:
        if analyzed:
            connection.execute("ANALYZE")
        for statement in hot_statements(hot):
            parameters = [None] * statement.count("?")
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            for step in plan:
                assert not WALK.search(step), (statement, plan)
                for index in WHOLE_PARTITION.findall(step):
                    assert index in ORDERED, (statement, plan)
            explained += bool(plan)
    assert explained > 20


async def test_the_plans_would_show_a_walk(hot: HotPath, tmp_path: Path) -> None:
    """That is, the names of the tables and indexes above are right."""
    with closing(sqlite3.connect(tmp_path / "hot.db")) as connection:
        for table in TABLES:
            [row] = connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table.name}")
            assert WALK.search(row[3])
            [row] = connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table.name} WHERE partition_id = ''")
            assert WHOLE_PARTITION.search(row[3])
        indexes = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert set(ORDERED) <= indexes
