"""Plans of PostgreSQL, with what each touched, on databases of which the planner knows little, much, or what was."""

import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateSequence, CreateTable

from lightning_sql.database.dialects.hot_statement import HotStatement
from lightning_sql.database.native import ORDERS, TABLES

__all__ = ["Plan", "Session", "analyze", "create", "plan_of", "plan_of_text", "prepare", "seed", "session_on"]

Session: TypeAlias = "asyncpg.Connection[Any]"
NAMES = frozenset(table.name for table in TABLES)


@dataclass(frozen=True)
class Plan:
    """What a statement did, by its plan."""

    text: str
    touched: Mapping[str, float]
    """Rows that were looked at, by base table: those that were answered by a scan and those that it threw away."""
    handled: float
    """Rows that went through scans of anything, joins and sorts."""
    walked: Sequence[str]
    """Base tables that were read from one end to the other."""
    buffers: int
    """Pages of 8 kB that were looked at."""


def _nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _rows(node: Mapping[str, Any]) -> float:
    removed = sum(value for name, value in node.items() if name.startswith("Rows Removed by"))
    return (node["Actual Rows"] + removed) * node["Actual Loops"]


def _plan(explained: str) -> Plan:
    [answer] = json.loads(explained)
    root = answer["Plan"]
    touched: dict[str, float] = {}
    walked: list[str] = []
    handled = 0.0
    for node in _nodes(root):
        rows = _rows(node)
        handled += rows
        name = node.get("Relation Name")
        if name is None and node["Node Type"] == "Bitmap Index Scan":
            name = next(table for table in NAMES if table in node["Index Name"])
        if name in NAMES and node["Node Type"] != "ModifyTable":
            touched[name] = touched.get(name, 0.0) + rows
            if node["Node Type"] == "Seq Scan":
                walked.append(name)
    buffers = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
    return Plan("\n".join(_lines(root, 0)), touched, handled, walked, buffers)


def _lines(node: Mapping[str, Any], depth: int) -> Iterator[str]:
    names = (node.get(name, "") for name in ("Node Type", "CTE Name", "Relation Name", "Alias", "Index Name"))
    tests = (f"{name}: {str(text)[:120]}" for name, text in node.items() if name in ("Index Cond", "Filter"))
    counts = f"(expected {node['Plan Rows']}, rows {_rows(node):.0f} in {node['Actual Loops']} loops)"
    yield "  " * depth + " ".join([*filter(None, names), counts, *tests])
    for child in node.get("Plans", ()):
        yield from _lines(child, depth + 1)


def literal(value: Any) -> str:
    """A value as SQL, of a type that the statement says."""
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return _quoted("{" + ",".join(map(_element, value)) + "}")
    if isinstance(value, float) and not math.isfinite(value):
        return _quoted(repr(value))
    return repr(value) if isinstance(value, int | float) else _quoted(str(value))


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return repr(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@asynccontextmanager
async def session_on(url: str, settings: str = "") -> AsyncIterator[Session]:
    """A session of one's own."""
    session = await asyncpg.connect(url)
    try:
        if settings:
            await session.execute(settings)
        yield session
    finally:
        await session.close()


async def prepare(session: Session, statement: HotStatement, values: Mapping[str, Any]) -> None:
    """Prepare a statement and run it once, so that its generic plan is made and kept."""
    await session.execute(f"PREPARE {statement.name} AS {statement.sql}")
    await session.execute(f"BEGIN; EXECUTE {_execution(statement, values)}; ROLLBACK")


def _execution(statement: HotStatement, values: Mapping[str, Any]) -> str:
    return f"{statement.name} ({', '.join(map(literal, statement.arguments(values)))})"


async def plan_of(session: Session, statement: HotStatement, values: Mapping[str, Any]) -> Plan:
    """The plan of a prepared statement with these values, which it then has had no effect with."""
    transaction = session.transaction()
    await transaction.start()
    try:
        options = "ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON"
        explained = await session.fetchval(f"EXPLAIN ({options}) EXECUTE {_execution(statement, values)}")
    finally:
        await transaction.rollback()
    return _plan(explained)


async def plan_of_text(session: Session, text: str, *values: Any) -> Plan:
    """The plan of a statement that reads."""
    return _plan(await session.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {text}", *values))


async def analyze(session: Session) -> None:
    for table in TABLES:
        await session.execute(f"ANALYZE {table.name}")


SEED = """
INSERT INTO rollouts (partition_id, rollout_id, seq, status, mode, resources_id, start_time, end_time,
    timeout_seconds, max_attempts, retry_condition, queue_position, attempt_count, watch_at, input, metadata)
SELECT p, 'r' || n, nextval('rollouts_order'), s, 'train', NULL, n,
    CASE WHEN s IN ('succeeded', 'failed') THEN n + 1 END, CASE WHEN n % 2 = 0 THEN 60.0 END, 3, '["failed"]',
    CASE WHEN s IN ('queuing', 'requeuing') THEN currval('rollouts_order') END,
    CASE WHEN s = 'queuing' THEN 0 ELSE 1 + n % 2 END,
    CASE WHEN n % 2 = 0 AND s = 'running' THEN 4e9 + n END, '{"task": "something to do"}', '{}'
FROM (
    SELECT n, (ARRAY['queuing', 'requeuing', 'running', 'running', 'failed', 'succeeded', 'succeeded', 'succeeded',
        'succeeded', 'succeeded'])[1 + n % 10] AS s
    FROM generate_series($1::bigint, $2::bigint) n
) d CROSS JOIN unnest(ARRAY['p', 'q']) p
"""
SEED_ATTEMPTS = """
INSERT INTO attempts (partition_id, rollout_id, attempt_id, sequence_id, status, worker_id, start_time)
SELECT partition_id, rollout_id, 'a' || k, k, 'running', 'w' || (seq % 200), start_time
FROM rollouts CROSS JOIN generate_series(1, 2) k WHERE k <= attempt_count AND start_time BETWEEN $1 AND $2
"""
SEED_SPANS = """
INSERT INTO spans (partition_id, rollout_id, attempt_id, span_id, seq, sequence_id, trace_id, name, status, attributes,
    events, links, resource)
SELECT partition_id, rollout_id, attempt_id, 's' || k, nextval('spans_order'), k, 't', 'name', '{"status_code": "OK"}',
    '{}', '[]', '[]', '{}'
FROM attempts CROSS JOIN generate_series(1, 2) k WHERE start_time BETWEEN $1 AND $2
"""
SEED_COUNTERS = """
INSERT INTO span_sequences SELECT partition_id, rollout_id, 4 FROM rollouts
WHERE attempt_count > 0 AND start_time BETWEEN $1 AND $2
"""
SEED_WORKERS = """
INSERT INTO workers (partition_id, worker_id, seq, status)
SELECT p, 'w' || n, nextval('workers_order'), 'idle'
FROM generate_series($1::bigint, least($2::bigint, 2000)) n CROSS JOIN unnest(ARRAY['p', 'q']) p
"""
SEED_RESOURCES = """
INSERT INTO resources SELECT p, 'rs' || n, n, n, n, 1, '{}'
FROM generate_series($1::bigint, least($2::bigint, 2000)) n CROSS JOIN unnest(ARRAY['p', 'q']) p
"""
SEED_KEYS = """
INSERT INTO idempotency_keys SELECT partition_id, 'k' || rollout_id, 0, 'route', 'print', '[]', start_time
FROM rollouts WHERE start_time BETWEEN $1 AND $2
"""


async def create(session: Session) -> None:
    """The native store's tables, of which only we tell the planner anything."""
    dialect = postgresql.dialect()
    for sequence in ORDERS.values():
        await session.execute(str(CreateSequence(sequence).compile(dialect=dialect)))
    for table in TABLES:
        await session.execute(str(CreateTable(table).compile(dialect=dialect)))
        await session.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = false)")
        for index in table.indexes:
            await session.execute(str(CreateIndex(index).compile(dialect=dialect)))


async def seed(session: Session, last: int, first: int = 1) -> None:
    """Rollouts of these numbers in each of two partitions, with attempts, spans, counters, workers and resources."""
    await session.execute("SET synchronous_commit = off")
    for statement in (SEED, SEED_ATTEMPTS, SEED_SPANS, SEED_COUNTERS, SEED_WORKERS, SEED_RESOURCES, SEED_KEYS):
        await session.execute(statement, first, last)
