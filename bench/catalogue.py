"""What a database says about its own tables, so that what is written straight into them follows the schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from bench.drivers.calls import NotAvailableError


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column that a row must or may give.

    Attributes:
        type_name: what a value is cast to, as the database spells it.
        needed: whether a row without it is refused.
    """

    name: str
    type_name: str
    needed: bool

    @property
    def neutral(self) -> str:
        """SQL of the value of a column that nothing is known of: NULL where that is allowed."""
        if not self.needed:
            return "NULL"
        kind = self.type_name.lower()
        return next((value for word, value in _NEUTRAL.items() if word in kind), "''")


_NEUTRAL: Final = {"int": "0", "double": "0", "real": "0", "bool": "false", "json": "'{}'"}


async def postgres_columns(connection: Any, table: str) -> list[TableColumn]:
    """The columns of a table.

    Raises:
        NotAvailableError: there is no such table.
    """
    rows = await connection.fetch(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, "
        "a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' AS needed "
        "FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped "
        "AND a.attgenerated = '' ORDER BY a.attnum",
        table,
    )
    return _known(table, (TableColumn(row["attname"], row["type"], row["needed"]) for row in rows))


def sqlite_columns(connection: sqlite3.Connection, table: str) -> list[TableColumn]:
    """The columns of a table.

    Raises:
        NotAvailableError: there is no such table.
    """
    rows = connection.execute('SELECT name, type, "notnull", dflt_value FROM pragma_table_info(?)', (table,))
    return _known(
        table, (TableColumn(name, kind, bool(needed) and not default) for name, kind, needed, default in rows)
    )


def _known(table: str, columns: Iterable[TableColumn]) -> list[TableColumn]:
    found = list(columns)
    if not found:
        raise NotAvailableError(f"this release has no table {table!r}")
    return found


def insert_select(
    table: str, columns: Iterable[TableColumn], known: Mapping[str, str], source: str, *, casts: bool
) -> str:
    """An INSERT of what a FROM clause brings, with the SQL of the known columns and neutral values for the others."""
    pairs = [(column, known.get(column.name, column.neutral)) for column in columns]
    values = [f"CAST({value} AS {column.type_name})" if casts else value for column, value in pairs]
    return f"INSERT INTO {table} ({', '.join(column.name for column, _ in pairs)}) SELECT {', '.join(values)} {source}"


async def connect_postgres(database_url: str) -> Any:
    """A connection of asyncpg's own to the database of a URL, whatever driver the URL names."""
    return await asyncpg.connect("postgresql://" + database_url.partition("://")[2])


def sqlite_file(database_url: str) -> str:
    """The file of an `sqlite:///` URL."""
    return database_url.partition(":///")[2].partition("?")[0]
