"""SQLite 3.35 or newer: one writer at a time, readers beside it (WAL). Through aiosqlite, and threads of our own."""

from __future__ import annotations

import asyncio
import functools
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Executable, Table, Text, event, func, literal, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import URL, Connection, ExceptionContext
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool
from typing_extensions import override

from lightning_sql.database.dialects.base import Dialect, EnginePair, Failure, UpsertStatement
from lightning_sql.database.dialects.hot import HotPath
from lightning_sql.database.dialects.sqlite_fork import ForkableConnection, ForkedError, using
from lightning_sql.database.dialects.sqlite_hot import SQLiteHotPath
from lightning_sql.database.dialects.sqlite_thread import BEGIN_READ, BEGIN_WRITE, READERS, configure
from lightning_sql.database.payload import encode_text
from lightning_sql.errors import ConfigurationError, TransactionConflictError
from lightning_sql.fields import FieldKind

__all__ = ["SQLite"]

BUSY_TIMEOUT_MILLISECONDS: Final = 30_000
POOL_TIMEOUT_SECONDS: Final = 60
WAL_MILLISECONDS: Final = 1_000
"""How long one try to switch a file to WAL waits; a process that is to be forked waits for it."""

_PRAGMAS: Final = {
    "busy_timeout": str(BUSY_TIMEOUT_MILLISECONDS),
    "synchronous": "FULL",  # in WAL mode, only FULL syncs before a commit is acknowledged
    "cache_size": "-65536",
    "temp_store": "MEMORY",
    "wal_autocheckpoint": "4000",  # pages: a checkpoint costs two syncs, and writes a page that changed often once
}
_SYNCHRONOUS: Final = ("FULL", "NORMAL", "EXTRA")

_FAILURES: Final[dict[int, Failure]] = {
    sqlite3.SQLITE_CONSTRAINT_UNIQUE: Failure.DUPLICATE,
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY: Failure.DUPLICATE,
    sqlite3.SQLITE_BUSY: Failure.CONFLICT,
    sqlite3.SQLITE_LOCKED: Failure.CONFLICT,
    sqlite3.SQLITE_CANTOPEN: Failure.REFUSED,
    sqlite3.SQLITE_NOTADB: Failure.REFUSED,
    sqlite3.SQLITE_PERM: Failure.REFUSED,
    sqlite3.SQLITE_READONLY: Failure.UNAVAILABLE,
    sqlite3.SQLITE_FULL: Failure.FULL,
    sqlite3.SQLITE_IOERR: Failure.UNAVAILABLE,
    sqlite3.SQLITE_CORRUPT: Failure.UNAVAILABLE,
    sqlite3.SQLITE_TOOBIG: Failure.UNSTORABLE,
    # "SQL logic error": a prepared statement of ours fails so only when a table or column is missing.
    sqlite3.SQLITE_ERROR: Failure.SCHEMA,
}


def _codes(error: BaseException) -> Iterator[int]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        code = getattr(link, "sqlite_errorcode", None)
        if isinstance(code, int):
            yield code
        link = getattr(link, "orig", None) or link.__cause__


def _file_of(url: URL) -> Path:
    if not url.database or url.database == ":memory:":
        raise ConfigurationError("an SQLite database in memory differs for each connection; use memory:// instead")
    if url.host or url.username or url.password or url.port:
        raise ConfigurationError("an SQLite URL has no host: it is sqlite:///file, or sqlite:////folder/file")
    return Path(url.database)


def _pragmas(url: URL) -> dict[str, str]:
    """The pragmas of every connection; the URL may choose how safe a commit is.

    Raises:
        ConfigurationError: the URL has other parameters.
    """
    pragmas = dict(_PRAGMAS)
    for key, value in url.query.items():
        if key != "synchronous" or str(value).upper() not in _SYNCHRONOUS:
            # What it is called may be a part of a password, in a URL that was meant for another database.
            raise ConfigurationError(
                f"the database URL has an unknown parameter; it may have synchronous={'|'.join(_SYNCHRONOUS)}"
            )
        pragmas[key] = str(value).upper()
    return pragmas


def _enable_wal(file: Path) -> None:
    """Switch a database file to WAL, which it then stays in.

    Several processes at once may be refused in spite of the busy timeout, so it is tried again.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MILLISECONDS / 1000
    while True:
        try:
            with using(), closing(sqlite3.connect(file, timeout=WAL_MILLISECONDS / 1000)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigurationError(f"the database file {str(file)!r} cannot be opened") from error
            if time.monotonic() > deadline:
                raise TransactionConflictError(f"the database file {str(file)!r} stays locked") from error
            time.sleep(0.05)
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{str(file)!r} is not an SQLite database") from error


def _copy(file: Path, target: Path) -> None:
    with using(), closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)


class SQLite(Dialect):
    """Time is the process's: one node, one clock."""

    name = "sqlite"
    is_server = False
    parameters_per_statement = 32_000

    @override
    async def prepare(self, url: URL) -> None:
        await asyncio.to_thread(_enable_wal, _file_of(url))

    @override
    async def back_up(self, url: URL, revision: str) -> bool:
        file = _file_of(url)
        await asyncio.to_thread(_copy, file, file.with_name(f"{file.name}.before-upgrade-from-{revision}"))
        return True

    @override
    def engines(self, url: URL, *, reflection: bool = False, wait_seconds: float | None = None) -> EnginePair:
        _file_of(url)
        pragmas = _pragmas(url)
        address = url.set(drivername="sqlite+aiosqlite", query={})
        writer = self._engine(address, 1, BEGIN_WRITE, pragmas)
        reader = self._engine(address, READERS, BEGIN_READ, pragmas | {"query_only": "ON"})
        return EnginePair(writer, reader)

    @override
    def hot_path(
        self,
        url: URL,
        engines: EnginePair,
        partition: str,
        *,
        join: bool = True,
        claim_timeout: float | None = None,
        statement_seconds: float | None = None,
    ) -> HotPath:
        return SQLiteHotPath(
            _file_of(url), _pragmas(url), partition, self.failure, join=join, claim_timeout=claim_timeout
        )

    def _engine(self, url: URL, size: int, begin: str, pragmas: Mapping[str, str]) -> AsyncEngine:
        engine = create_async_engine(
            url,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_SECONDS,
            hide_parameters=True,  # errors and logs must not repeat what is stored
            connect_args={"factory": ForkableConnection},
        )

        def begun(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        configure(engine.sync_engine, pragmas)

        def failed(context: ExceptionContext) -> None:
            if isinstance(context.original_exception, ForkedError):
                context.is_disconnect = True

        event.listen(engine.sync_engine, "begin", begun)
        event.listen(engine.sync_engine, "handle_error", failed)
        return engine

    @override
    def transaction_options(self, *, writing: bool, snapshot: bool) -> Mapping[str, Any]:
        return {}

    @override
    def lock(self, keys: Sequence[int]) -> Executable | None:
        return None  # BEGIN IMMEDIATE has locked everything

    @override
    def now(self) -> Executable | None:
        return None

    @override
    def upsert(self, table: Table) -> UpsertStatement:
        return cast(UpsertStatement, insert(table))

    @override
    def greatest(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.max(left, right)

    @override
    def stored_size(self, column: ColumnElement[Any]) -> None:
        return None

    @override
    def concatenated(self, parts: Sequence[ColumnElement[str]]) -> ColumnElement[str]:
        return functools.reduce(lambda left, right: left.concat(right), parts)

    @override
    def position(self, column: ColumnElement[Any], text: str) -> ColumnElement[int]:
        return func.instr(column, literal(text, Text))

    @override
    def within(self, column: ColumnElement[Any], values: Sequence[Any], kind: FieldKind) -> ColumnElement[bool]:
        stored = [encode_text(value) for value in values] if kind is FieldKind.TEXT else list(values)
        # JSON has no infinity, but a number that SQLite reads as one.
        text = json.dumps(stored).replace("Infinity", "9e999") if kind is FieldKind.REAL else json.dumps(stored)
        listed = func.json_each(literal(text, Text)).table_valued("value")
        return column.in_(select(listed.c.value))

    @override
    def failure(self, error: BaseException) -> Failure:
        for code in _codes(error):
            failure = _FAILURES.get(code) or _FAILURES.get(code & 0xFF)
            if failure is not None:
                return failure
        return Failure.UNAVAILABLE if isinstance(error, OSError | PoolTimeoutError) else Failure.OTHER
