"""What the statements of `postgresql_statements` are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Table

from lightning_sql import lifecycle
from lightning_sql.database.dialects.hot_statement import Given
from lightning_sql.database.types import Payload
from lightning_sql.records import ATTEMPT_ACTIVE, ROLLOUT_ACTIVE, ROLLOUT_FINISHED, ROLLOUT_QUEUED

__all__ = [
    "ACTIVE",
    "BUSY",
    "ENDED",
    "FINISHED",
    "NOW",
    "QUEUED",
    "case",
    "columns",
    "locked_rollout",
    "noted_part",
    "texts",
    "words",
]


def words(values: Iterable[str]) -> str:
    """Words of the protocol as what IN is given."""
    return "(" + ", ".join(f"'{value}'" for value in sorted(values)) + ")"


def case(value: str, table: Mapping[Any, Any], otherwise: str) -> str:
    """A CASE that looks a value up in one of the rules' tables."""
    arms = " ".join(f"WHEN '{key}' THEN '{result}'" for key, result in table.items())
    return f"CASE {value} {arms} ELSE {otherwise} END"


def columns(alias: str, names: Iterable[str]) -> str:
    """Columns of a table or subquery."""
    return ", ".join(f"{alias}.{name}" for name in names)


def texts(alias: str, table: Table, names: Iterable[str]) -> str:
    """Columns with payloads as text, which the driver need not decode."""
    return ", ".join(
        f"CAST({alias}.{name} AS text) AS {name}" if isinstance(table.c[name].type, Payload) else f"{alias}.{name}"
        for name in names
    )


QUEUED: Final = words(ROLLOUT_QUEUED)
ACTIVE: Final = words(ROLLOUT_ACTIVE)
FINISHED: Final = words(ROLLOUT_FINISHED)
ENDED: Final = words(lifecycle.ATTEMPT_ENDED)
BUSY: Final = words(ATTEMPT_ACTIVE)

# The time at which the statement came, or the one that was given; the same wherever the statement asks.
# `extract` would make a numeric of it, and that a double precision by way of a text.
NOW: Final = "coalesce(CAST(:now AS double precision), date_part('epoch', statement_timestamp()))"


def locked_rollout(rollout_id: str) -> str:
    """A rollout as it is now, and stays until this statement is done."""
    return f"""(
        SELECT r.status, r.attempt_count, r.max_attempts, r.retry_condition, r.mode, r.start_time AS begun,
            r.timeout_seconds IS NOT NULL OR r.unresponsive_seconds IS NOT NULL AS limited
        FROM rollouts r WHERE r.partition_id = :partition AND r.rollout_id = {rollout_id}
        LIMIT 1 FOR NO KEY UPDATE
    )"""


_NOTE_KINDS: Final = {"note_keys": "text", "note_parts": "bigint", "note_routes": "text", "note_prints": "text"}


def noted_part(given: Given, kinds: Mapping[str, str], ids: str, source: str = "", written: str = "") -> str:
    """A part that writes down notes `n` with their `ids`, in the order of their keys: all statements lock alike.

    `kinds` are the columns of a note beyond the usual ones; `source` is what it is joined with, and `written`
    says of which.
    """
    names = ("key", "part", "route", "fingerprint", *kinds)
    return f""",
noted AS (
    INSERT INTO idempotency_keys (partition_id, key, part, route, fingerprint, ids, time)
    SELECT :partition, n.key, n.part, n.route, n.fingerprint, {ids}, {NOW}
    FROM {given.rows(_NOTE_KINDS | dict(kinds), "n", *names)}
    {source}
    {"GROUP BY n.key, n.part, n.route, n.fingerprint" if source else ""} {written}
    ORDER BY n.key, n.part
)"""
