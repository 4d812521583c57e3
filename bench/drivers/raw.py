"""What the database's driver can do on the same tables with nothing of ours in between."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from bench.catalogue import connect_postgres, insert_select, postgres_columns, sqlite_file
from bench.drivers.meter import Meter, closed_loop
from bench.payloads import SPAN_BYTES, span
from lightning_sql.store.factory import prepare_database

COMMITTED: Final = json.dumps(span("ro-000000000000", "at-00000000", 1, size=300))
"""What the bare one-row commit writes."""

CLAIM: Final = """
WITH front AS (
    SELECT partition_id, rollout_id FROM rollouts
    WHERE partition_id = $1 AND queue_position IS NOT NULL
    ORDER BY queue_position LIMIT 1 FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE rollouts SET status = 'preparing', queue_position = NULL, attempt_count = attempt_count + 1
    FROM front WHERE rollouts.partition_id = front.partition_id AND rollouts.rollout_id = front.rollout_id
    RETURNING rollouts.*
), attempt AS (
    INSERT INTO attempts (partition_id, rollout_id, attempt_id, sequence_id, status, worker_id, start_time)
    SELECT partition_id, rollout_id, $2, attempt_count, 'preparing', $3, $4 FROM claimed
    RETURNING *
), worker AS (
    INSERT INTO workers (partition_id, worker_id, seq, status, last_dequeue_time, last_busy_time,
                         current_rollout_id, current_attempt_id)
    SELECT partition_id, $3, $5, 'busy', $4, $4, rollout_id, attempt_id FROM attempt
    ON CONFLICT (partition_id, worker_id) DO UPDATE SET
        status = 'busy', last_dequeue_time = $4, last_busy_time = $4,
        current_rollout_id = excluded.current_rollout_id, current_attempt_id = excluded.current_attempt_id
)
SELECT claimed.*, attempt.attempt_id, attempt.sequence_id, attempt.worker_id, attempt.start_time AS claim_time
FROM claimed JOIN attempt USING (partition_id, rollout_id)
"""


async def commits(database_url: str, meter: Meter, *, requests: int) -> None:
    """One row, durable, in its own transaction, one after the other: what no store can do without."""
    if database_url.startswith("sqlite"):
        await asyncio.to_thread(
            _sqlite_commits, Path(sqlite_file(database_url)).with_name("commits.db"), meter, requests
        )
        return
    connection = await connect_postgres(database_url)
    try:
        await connection.execute("CREATE TABLE IF NOT EXISTS bench_commits (number bigint, body text)")
        statement = await connection.prepare("INSERT INTO bench_commits VALUES ($1, $2)")
        latencies: list[float] = []
        started = time.perf_counter()
        for number in range(requests):
            await meter.timed(statement.fetch(number, COMMITTED), latencies)
        meter.record("commit", latencies, time.perf_counter() - started)
    finally:
        await connection.close()


def _sqlite_commits(file: Path, meter: Meter, requests: int) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE IF NOT EXISTS commits (number integer, body text)")
        latencies: list[float] = []
        for number in range(requests):
            started = time.perf_counter()
            connection.execute("INSERT INTO commits VALUES (?, ?)", (number, COMMITTED))
            latencies.append(time.perf_counter() - started)
        meter.calls += requests
        meter.record("commit", latencies, sum(latencies))
    finally:
        connection.close()


async def analyze(database_url: str) -> None:
    """Refresh the statistics of a PostgreSQL database, so that whoever comes first has no worse plans."""
    if database_url.startswith("postgresql"):
        connection = await connect_postgres(database_url)
        try:
            await connection.execute("ANALYZE")
        finally:
            await connection.close()


async def claims(database_url: str, meter: Meter, partition: str, *, connections: int, count: int) -> None:
    """Claim so many queued rollouts of a partition with one statement each, on so many connections."""
    pool = [await connect_postgres(database_url) for _ in range(connections)]
    try:
        statements = [await connection.prepare(CLAIM) for connection in pool]
        latencies: list[float] = []
        claimed: list[str] = []
        numbers = iter(range(count))

        async def client(worker: int) -> None:
            for number in numbers:
                values = (partition, f"at-{number:08x}", f"worker-{worker}", time.time(), worker)
                rows = await meter.timed(statements[worker].fetch(*values), latencies)
                claimed.extend(row["rollout_id"] for row in rows or ())

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for worker in range(connections):
                group.create_task(client(worker))
        meter.record("claim", latencies, time.perf_counter() - started)
        meter.check(len(set(claimed)) == count, f"{len(set(claimed))} of {count} rollouts were claimed")
    finally:
        for connection in pool:
            await connection.close()


async def spans(database_url: str, meter: Meter, *, clients: int, requests: int, spans: int = 100) -> None:
    """Batches of spans by `unnest` into a copy of the table of spans, with its indexes."""
    await prepare_database(database_url)
    pool = [await connect_postgres(database_url) for _ in range(clients)]
    table = "bench_spans"
    try:
        await pool[0].execute(f"DROP TABLE IF EXISTS {table}")
        columns = await postgres_columns(pool[0], "spans")
        await pool[0].execute(f"CREATE TABLE {table} (LIKE spans INCLUDING ALL)")
        names = ["partition_id", "seq", *span("", "", 1)]
        given = {column.name: column.type_name for column in columns if column.name in names}
        arrays = ", ".join(f"${place}::{kind}[]" for place, kind in enumerate(given.values(), 1))
        insert = insert_select(
            table,
            columns,
            {name: name for name in given},
            f"FROM unnest({arrays}) AS new ({', '.join(given)})",
            casts=True,
        )
        statements = [await connection.prepare(f"{insert} ON CONFLICT DO NOTHING") for connection in pool]
        batches = [
            [_arrays(given, client, range(batch * spans + 1, (batch + 1) * spans + 1)) for batch in range(requests)]
            for client in range(clients)
        ]
        latencies: list[float] = []

        async def add(statement: Any, arrays: list[list[Any]]) -> None:
            await meter.timed(statement.fetch(*arrays), latencies)

        calls = [lambda c=c, b=b: add(statements[c], batches[c][b]) for b in range(requests) for c in range(clients)]
        if clients == 1:
            seconds = await closed_loop(1, calls)
        else:
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for client in range(clients):
                    group.create_task(_in_turn(calls[client::clients]))
            seconds = time.perf_counter() - started
        meter.record("spans", latencies, seconds, each=spans)
        stored = await pool[0].fetchval(f"SELECT count(*) FROM {table}")
        meter.check(stored == clients * requests * spans, f"{stored} of {clients * requests * spans} spans were stored")
        await pool[0].execute(f"DROP TABLE {table}")
    finally:
        for connection in pool:
            await connection.close()


async def _in_turn(calls: list[Any]) -> None:
    for call in calls:
        await call()


def _arrays(columns: dict[str, str], client: int, numbers: range) -> list[list[Any]]:
    """The spans of these numbers, a list for each column."""
    rows = [
        {"partition_id": "raw", "seq": number} | span(f"ro-{client:012x}", f"at-{client:08x}", number, SPAN_BYTES)
        for number in numbers
    ]
    return [
        [json.dumps(row[name]) if kind.startswith("json") and row[name] is not None else row[name] for row in rows]
        for name, kind in columns.items()
    ]
