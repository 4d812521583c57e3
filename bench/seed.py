"""Fills a database of ours with finished rollouts: `python -m bench.seed URL --rollouts N`.

Each has an attempt, a small span and its sequence number. They are written straight into the tables, whose
columns are read from the catalogue; then the database is analyzed and its log is emptied, as in one that has
been running for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
from collections.abc import Mapping
from typing import Any, Final

from bench.catalogue import connect_postgres, insert_select, postgres_columns, sqlite_columns, sqlite_file
from bench.drivers.calls import NotAvailableError
from bench.payloads import rollout_input, span, span_name
from bench.seeds import FIRST_TIME, MASK, SCRAMBLE, SECONDS_APART, SUCCEEDED_OF_TEN
from lightning_sql.errors import LightningError
from lightning_sql.store.factory import prepare_database

CHUNK: Final = 50_000
EXIT_NOT_AVAILABLE: Final = 3


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text.replace("'", "''") + "'"


def _values(hexadecimal: str) -> dict[str, dict[str, str]]:
    """The SQL of the known columns by table, for the number `n`; `hexadecimal` formats a value in a width."""

    def hexed(value: str, width: int) -> str:
        return hexadecimal.format(value=value, width=width)

    spread = f"((n * {SCRAMBLE}) & {MASK})"
    start = f"({FIRST_TIME} + n * {SECONDS_APART})"
    status = f"CASE WHEN n % 10 < {SUCCEEDED_OF_TEN} THEN 'succeeded' ELSE 'failed' END"
    keys = {
        "partition_id": "'default'",
        "rollout_id": f"'ro-' || {hexed(spread, 12)}",
        "attempt_id": f"'at-' || {hexed(f'({spread} & 4294967295)', 8)}",
    }
    times = {"start_time": start, "end_time": f"{start} + 1", "sequence_id": "1"}
    payloads = {
        name: _quoted(value) for name, value in span("", "", 1, size=0).items() if isinstance(value, dict | list)
    }
    rollout = {
        "seq": "n",
        "status": status,
        "mode": "'train'",
        "input": _quoted(rollout_input()),
        "metadata": "'{}'",
        "max_attempts": "1",
        "retry_condition": "'[]'",
        "attempt_count": "1",
    }
    spans = {"seq": "n", "span_id": _quoted(span_name(1)), "trace_id": f"{hexed(spread, 32)}", "name": "'step'"}
    return {
        "rollouts": keys | times | rollout,
        "attempts": keys | times | {"status": status},
        "spans": keys | times | payloads | spans,
        "span_sequences": keys | {"value": "1"},
    }


async def _fill_postgres(database_url: str, rollouts: int, sizes: Mapping[str, dict[str, str]]) -> None:
    connection = await connect_postgres(database_url)
    try:
        for table, known in sizes.items():
            columns = await postgres_columns(connection, table)
            insert = insert_select(
                table, columns, known, "FROM generate_series($1::bigint, $2::bigint) AS n", casts=True
            )
            for first in range(1, rollouts + 1, CHUNK):
                await connection.execute(insert, first, min(first + CHUNK - 1, rollouts))
            order = await connection.fetchval("SELECT to_regclass($1)::text", f"{table}_order")
            if order is not None:
                await connection.execute("SELECT setval($1::regclass, $2)", order, rollouts)
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


def _fill_sqlite(database_url: str, rollouts: int, sizes: Mapping[str, dict[str, str]]) -> None:
    connection = sqlite3.connect(sqlite_file(database_url), isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -200000")
        numbers = (
            "FROM (WITH RECURSIVE up(n) AS (SELECT ? UNION ALL SELECT n + 1 FROM up WHERE n < ?) SELECT n FROM up)"
        )
        for table, known in sizes.items():
            insert = insert_select(table, sqlite_columns(connection, table), known, numbers, casts=False)
            for first in range(1, rollouts + 1, CHUNK):
                connection.execute(insert, (first, min(first + CHUNK - 1, rollouts)))
        connection.execute("ANALYZE")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


async def fill(database_url: str, rollouts: int) -> None:
    """Create the schema of an empty database and put so many finished rollouts into it.

    Raises:
        NotAvailableError: this release does not have the native tables.
        LightningError: the database cannot be prepared.
    """
    await prepare_database(database_url)
    if database_url.startswith("sqlite"):
        _fill_sqlite(database_url, rollouts, _values("printf('%0{width}x', {value})"))
    else:
        await _fill_postgres(database_url, rollouts, _values("lpad(to_hex({value}), {width}, '0')"))


def main() -> None:
    """Fill the database that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database_url", metavar="URL")
    parser.add_argument("--rollouts", type=int, required=True, metavar="N")
    options = parser.parse_args()
    try:
        asyncio.run(fill(options.database_url, options.rollouts))
    except NotAvailableError as error:
        parser.exit(EXIT_NOT_AVAILABLE, f"{error}\n")
    except LightningError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
