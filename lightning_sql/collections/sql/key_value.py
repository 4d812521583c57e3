"""`KeyValue` over a table: counters by one statement each."""

from __future__ import annotations

import json
import math
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Double, Table, and_, case, delete, func, null, or_, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.protocols import KeyValue
from lightning_sql.collections.sql.session import Row, Session, SqlContainer
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import UnstorableValueError

__all__ = ["SqlKeyValue"]

K = TypeVar("K")
V = TypeVar("V")

_LEAST, _GREATEST = -(2**63), 2**63 - 1


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _LEAST <= value <= _GREATEST


class SqlKeyValue(SqlContainer, KeyValue[K, V], Generic[K, V]):
    """A key-value store over a table made by `schema.key_value_table`.

    Integers of 64 bits and floats have columns of their own, which arithmetic needs; every other
    value is stored as JSON. A key that is no string is stored by its JSON.
    """

    def __init__(self, session: Session, table: Table, *, tracker: MetricsTracker | None = None) -> None:
        super().__init__(session, table, tracker)

    def _key(self, key: K) -> str:
        return key if isinstance(key, str) else "\x1a" + json.dumps(key)

    def _row(self, key: K, value: V) -> Row:
        integer = _is_integer(value)
        real = isinstance(value, float) and math.isfinite(value)
        return {
            PARTITION: self._session.partition,
            "key": self._key(key),
            "integer": value if integer else None,
            "real": value if real else None,
            # Wrapped, so that None is a value like any other.
            "document": None if integer or real else [value],
        }

    def _value(self, row: Any) -> V:
        if row.integer is not None:
            return row.integer
        # RETURNING on SQLite gives a REAL without a fraction as an integer.
        return row.document[0] if row.real is None else cast(V, float(row.real))

    @property
    def _columns(self) -> list[Any]:
        return [self._table.c.integer, self._table.c.real, self._table.c.document]

    async def _find(self, key: K) -> Any:
        statement = select(*self._columns).where(self._mine, self._table.c.key == self._key(key))

        async def find(connection: AsyncConnection) -> Any:
            return (await connection.execute(statement)).first()

        return await self._session.read(find)

    @override
    async def has(self, key: K) -> bool:
        async with self._tracked("has"):
            return await self._find(key) is not None

    @override
    async def get(self, key: K, default: V | None = None) -> V | None:
        async with self._tracked("get"):
            row = await self._find(key)
            return default if row is None else self._value(row)

    @override
    async def set(self, key: K, value: V) -> None:
        statement = self._dialect.upsert(self._table).values(self._row(key, value))
        changes = {name: statement.excluded[name] for name in ("integer", "real", "document")}
        async with self._tracked("set"):
            upsert = statement.on_conflict_do_update(index_elements=[PARTITION, "key"], set_=changes)
            await self._session.write(lambda connection: _run(connection, upsert))

    @override
    async def inc(self, key: K, amount: V) -> V:
        delta = checks.check_number(amount, "the amount")
        self._check_range(delta)
        columns = self._table.c
        statement = self._dialect.upsert(self._table).values(self._row(key, amount))
        given = statement.excluded
        fits = columns.integer <= _GREATEST - delta if delta >= 0 else columns.integer >= _LEAST - delta
        both_whole = and_(columns.integer.is_not(None), given["integer"].is_not(None))
        changes = {
            # NULL as soon as one of the two is a float.
            "integer": columns.integer + given["integer"],
            "real": case((both_whole, null()), else_=self._number(columns) + self._number(given)),
        }
        room = or_(columns.integer.is_(None), fits) if isinstance(delta, int) else columns.document.is_(None)
        async with self._tracked("inc"):
            return await self._session.write(
                lambda connection: self._compute(connection, key, statement, changes, room),
            )

    @override
    async def chmax(self, key: K, value: V) -> V:
        wanted = checks.check_number(value, "the value")
        self._check_range(wanted)
        columns = self._table.c
        statement = self._dialect.upsert(self._table).values(self._row(key, value))
        given = statement.excluded
        both_whole = and_(columns.integer.is_not(None), given["integer"].is_not(None))
        raised = self._number(given) > self._number(columns)
        changes = {
            # The greater of two integers; of an integer and a float the greater one, as what it is.
            "integer": case(
                (both_whole, self._dialect.greatest(columns.integer, given["integer"])),
                (raised, given["integer"]),
                else_=columns.integer,
            ),
            "real": case((both_whole, null()), (raised, given["real"]), else_=columns.real),
        }
        async with self._tracked("chmax"):
            return await self._session.write(
                lambda connection: self._compute(connection, key, statement, changes, columns.document.is_(None)),
            )

    def _number(self, columns: Any) -> Any:
        return func.coalesce(columns["real"], sql_cast(columns["integer"], Double))

    def _check_range(self, number: float) -> None:
        if isinstance(number, int) and not _LEAST <= number <= _GREATEST:
            raise UnstorableValueError("an integer does not fit 64 bits")

    async def _compute(
        self, connection: AsyncConnection, key: K, statement: Any, changes: dict[str, Any], room: Any
    ) -> V:
        upsert = statement.on_conflict_do_update(
            index_elements=[PARTITION, "key"], set_=changes, where=and_(self._table.c.document.is_(None), room)
        ).returning(*self._columns)
        row = (await connection.execute(upsert)).first()
        if row is not None:
            return self._value(row)
        stored = select(*self._columns).where(self._mine, self._table.c.key == self._key(key))
        # The row was there and refused, so it still is: the statement has locked it.
        checks.check_number(self._value((await connection.execute(stored)).one()), "the stored value")
        raise UnstorableValueError("the sum does not fit 64 bits")

    @override
    async def pop(self, key: K, default: V | None = None) -> V | None:
        statement = delete(self._table).where(self._mine, self._table.c.key == self._key(key))

        async def take(connection: AsyncConnection) -> Any:
            return (await connection.execute(statement.returning(*self._columns))).first()

        async with self._tracked("pop"):
            row = await self._session.write(take)
            return default if row is None else self._value(row)

    @override
    async def size(self) -> int:
        statement = select(func.count()).select_from(self._table).where(self._mine)

        async def count(connection: AsyncConnection) -> int:
            return (await connection.execute(statement)).scalar_one()

        async with self._tracked("size"):
            return await self._session.read(count)


async def _run(connection: AsyncConnection, statement: Any) -> None:
    await connection.execute(statement)
