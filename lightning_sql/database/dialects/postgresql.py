"""PostgreSQL 14 or newer, through asyncpg."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from asyncpg.exceptions import InternalClientError
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Double,
    Executable,
    Table,
    Text,
    any_,
    bindparam,
    extract,
    func,
    literal,
    select,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import URL
from sqlalchemy.exc import InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typing_extensions import override

from lightning_sql.database.dialects.base import Dialect, EnginePair, Failure, UpsertStatement
from lightning_sql.database.dialects.hot import HotPath
from lightning_sql.database.dialects.postgresql_hot import PostgreSQLHotPath
from lightning_sql.database.dialects.postgresql_session import IdleSessions, Sessions
from lightning_sql.database.types import COLUMN_TYPES
from lightning_sql.errors import ConfigurationError
from lightning_sql.fields import FieldKind

__all__ = ["PostgreSQL"]

POOL_SIZE: Final = 10
POOL_OVERFLOW: Final = 10
POOL_TIMEOUT_SECONDS: Final = 10
CONNECT_TIMEOUT_SECONDS: Final = 10

_BY_STATE: Final[dict[str, Failure]] = {
    "23505": Failure.DUPLICATE,
    "40001": Failure.CONFLICT,
    "40P01": Failure.CONFLICT,
    "53100": Failure.FULL,
    "55P03": Failure.CONFLICT,
    "25006": Failure.UNAVAILABLE,  # read-only: a standby
    "3D000": Failure.REFUSED,
    "42501": Failure.REFUSED,
    "42P01": Failure.SCHEMA,
    "42703": Failure.SCHEMA,
    "3F000": Failure.SCHEMA,
    "54000": Failure.UNSTORABLE,  # a key too long for an index
}
_BY_CLASS: Final[dict[str, Failure]] = {
    "08": Failure.UNAVAILABLE,
    "53": Failure.UNAVAILABLE,
    "57": Failure.UNAVAILABLE,
    "58": Failure.UNAVAILABLE,
    "28": Failure.REFUSED,
    "22": Failure.UNSTORABLE,
}
_PLANNER: Final = {
    # The front of the queue must come from its index in order, whatever the statistics say of a queue
    # that was empty when they were taken: a bitmap would read all of it, and sort it.
    "enable_bitmapscan": "off",
    # Statements are small and many; compiling one takes longer than running it.
    "jit": "off",
}
_SERVER_KEEPALIVE: Final = {
    # A server process that has gone without a word holds the locks of its transaction until the database notices.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_CONNECT_KEYWORDS: Final = {"sslmode": "ssl", "connect_timeout": "timeout"}
"""Parameters of libpq URLs that asyncpg calls by another name."""
_PARAMETERS: Final = (
    "application_name, command_timeout, connect_timeout, host, port, ssl, sslmode, target_session_attrs or timeout"
)


def _same(text: str) -> str:
    return text


def _states(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        state = getattr(link, "sqlstate", None)
        if isinstance(state, str):
            yield state
        link = getattr(link, "orig", None) or link.__cause__


class _Engines(EnginePair):
    """One engine for everything, and what lies in its pool."""

    def __init__(self, engine: AsyncEngine, sessions: Sessions) -> None:
        super().__init__(engine, engine)
        self.idle = IdleSessions(engine)
        self._sessions = sessions

    @override
    async def dispose(self) -> None:
        await super().dispose()
        await self._sessions.end()


class PostgreSQL(Dialect):
    """Readers and writers share one pool; time is the database's, so that several servers agree."""

    name = "postgresql"
    is_server = True
    parameters_per_statement = 32_000

    @override
    def engines(self, url: URL, *, reflection: bool = False, wait_seconds: float | None = None) -> EnginePair:
        query: dict[str, Any] = {}
        settings = {"application_name": "lightning-sql"} | _PLANNER | _SERVER_KEEPALIVE
        for key, value in url.query.items():
            text = value if isinstance(value, str) else value[-1]
            if key == "application_name":
                settings[key] = text
            elif key in ("connect_timeout", "timeout", "command_timeout"):
                try:
                    query[_CONNECT_KEYWORDS.get(key, key)] = float(text)
                except ValueError:
                    raise ConfigurationError(f"{key} in the database URL must be a number of seconds") from None
            elif key in ("sslmode", "ssl", "target_session_attrs"):
                query[_CONNECT_KEYWORDS.get(key, key)] = text
            elif key in ("host", "port"):
                continue
            else:
                # What it is called may be a part of a password that was not escaped.
                raise ConfigurationError(f"the database URL has an unknown parameter; it may have {_PARAMETERS}")
        # Who is not answered, or not let in, must find time to try again.
        patience = math.inf if wait_seconds is None else wait_seconds / 4
        sessions = Sessions()
        engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg").difference_update_query(
                [key for key in url.query if key not in ("host", "port")]
            ),
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
            pool_timeout=min(POOL_TIMEOUT_SECONDS, patience),
            # Errors and logs must not repeat what is stored.
            hide_parameters=True,
            # Payload columns are encoded and decoded by their type; the driver passes the text through.
            # Reflection reads JSON of SQLAlchemy's own making, which wants to be decoded.
            json_serializer=_same,
            json_deserializer=None if reflection else _same,
            connect_args={
                "timeout": min(CONNECT_TIMEOUT_SECONDS, patience),
                "command_timeout": None if wait_seconds is None else wait_seconds / 2,
                "connection_class": sessions.kind,
                "server_settings": settings,
            }
            | query,
        )
        return _Engines(engine, sessions)

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
        idle = cast(_Engines, engines).idle
        return PostgreSQLHotPath(engines.writer, partition, claim_timeout, statement_seconds, idle.break_all)

    @override
    def transaction_options(self, *, writing: bool, snapshot: bool) -> Mapping[str, Any]:
        # A writer that asked for a snapshot reads and then writes by what it read: only SERIALIZABLE
        # turns every way in which that can go wrong into an error that is retried.
        if writing:
            return {"isolation_level": "SERIALIZABLE" if snapshot else "READ COMMITTED", "postgresql_readonly": False}
        return {"isolation_level": "REPEATABLE READ" if snapshot else "READ COMMITTED", "postgresql_readonly": True}

    @override
    def lock(self, keys: Sequence[int]) -> Executable | None:
        locks = [func.pg_advisory_xact_lock(key) for key in keys]
        return select(*locks, self._clock())

    @override
    def now(self) -> Executable | None:
        return select(self._clock())

    def _clock(self) -> ColumnElement[float]:
        return sql_cast(extract("epoch", func.clock_timestamp()), Double)

    @override
    def upsert(self, table: Table) -> UpsertStatement:
        return cast(UpsertStatement, insert(table))

    @override
    def greatest(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.greatest(left, right)

    @override
    def stored_size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        return func.coalesce(func.pg_column_size(column), 0)

    @override
    def concatenated(self, parts: Sequence[ColumnElement[str]]) -> ColumnElement[str]:
        return func.concat(*parts, type_=Text())  # which copies each once, unlike `||`

    @override
    def position(self, column: ColumnElement[Any], text: str) -> ColumnElement[int]:
        return func.strpos(column, literal(text, Text))

    @override
    def within(self, column: ColumnElement[Any], values: Sequence[Any], kind: FieldKind) -> ColumnElement[bool]:
        return column == any_(bindparam(None, list(values), ARRAY(COLUMN_TYPES[kind]())))

    @override
    def failure(self, error: BaseException) -> Failure:
        for state in _states(error):
            failure = _BY_STATE.get(state) or _BY_CLASS.get(state[:2])
            if failure is not None:
                return failure
        # The driver says the last of these of a session that was ended while it was idle.
        if isinstance(error, OSError | TimeoutError | PoolTimeoutError | InterfaceError | InternalClientError):
            return Failure.UNAVAILABLE
        return Failure.UNAVAILABLE if getattr(error, "connection_invalidated", False) else Failure.OTHER
