"""`Queue` over a table: claims skip what another transaction holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter
from sqlalchemy import Table, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.protocols import Queue
from lightning_sql.collections.sql.session import Row, Session, SqlContainer
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.database.payload import encode_json
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.fields import FieldKind

__all__ = ["SqlQueue"]

Q = TypeVar("Q")

_EVERYTHING = 2**63 - 1


def _digest(value: Any) -> str:
    """Equal for values that are equal: the order of keys does not matter, nor do 1 and 1.0 differ."""
    return sha256(json.dumps(_canonical(value), sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [_canonical(item) for item in cast(list[Any], value)]
    return int(value) if isinstance(value, bool | float) and value == value // 1 else value


class SqlQueue(SqlContainer, Queue[Q]):
    """A queue of strings or pydantic items over a table made by `schema.queue_table`."""

    def __init__(
        self, session: Session, table: Table, item_type: type[Q], *, tracker: MetricsTracker | None = None
    ) -> None:
        super().__init__(session, table, tracker)
        self._item_type = item_type
        self._adapter: TypeAdapter[Q] = TypeAdapter(item_type)

    @override
    def item_type(self) -> type[Q]:
        return self._item_type

    def _plain(self, item: Q) -> Any:
        return item.model_dump(mode="python", warnings=False) if isinstance(item, BaseModel) else item

    def _digest_of(self, item: Q) -> str:
        plain = self._plain(item)
        return _digest(plain if isinstance(plain, str) else json.loads(encode_json(plain)))

    @override
    async def has(self, item: Q) -> bool:
        checks.check_items([item], self._item_type)
        statement = select(self._table.c[SEQ]).where(self._mine, self._table.c.digest == self._digest_of(item))
        async with self._tracked("has"):
            return await self._session.read(
                lambda connection: _any(connection, statement.limit(1)),
            )

    @override
    async def enqueue(self, items: Sequence[Q]) -> Sequence[Q]:
        checked = checks.check_items(items, self._item_type)
        async with self._tracked("enqueue"):
            if checked:
                rows: list[Row] = [
                    {PARTITION: self._session.partition, "digest": self._digest_of(item), "item": self._plain(item)}
                    for item in checked
                ]
                await self._session.write(lambda connection: connection.execute(insert(self._table), rows))
            return items

    @override
    async def dequeue(self, limit: int = 1) -> Sequence[Q]:
        if limit <= 0:
            return []
        front = (
            select(self._table.c[SEQ])
            .where(self._mine)
            .order_by(self._table.c[SEQ])
            .limit(min(limit, _EVERYTHING))
            .with_for_update(skip_locked=True)
            .cte("front")
        )
        statement = (
            delete(self._table)
            .where(self._table.c[SEQ].in_(select(front.c[SEQ])))
            .returning(self._table.c[SEQ], self._table.c.item)
        )

        async def take(connection: AsyncConnection) -> Sequence[Q]:
            rows = (await connection.execute(statement)).all()
            return self._items(item for _, item in sorted(rows, key=lambda row: row[0]))

        async with self._tracked("dequeue"):
            return await self._session.write(take)

    @override
    async def peek(self, limit: int = 1) -> Sequence[Q]:
        if limit <= 0:
            return []
        statement = select(self._table.c.item).where(self._mine).order_by(self._table.c[SEQ])

        async def look(connection: AsyncConnection) -> Sequence[Q]:
            rows = await connection.execute(statement.limit(min(limit, _EVERYTHING)))
            return self._items(rows.scalars())

        async with self._tracked("peek"):
            return await self._session.read(look)

    def _items(self, stored: Iterable[Any]) -> Sequence[Q]:
        return [self._adapter.validate_python(value) for value in stored]

    @override
    async def discard(self, items: Sequence[Q]) -> None:
        checked = checks.check_items(items, self._item_type)
        digests = [self._digest_of(item) for item in checked]
        async with self._tracked("discard"):
            if digests:
                condition = self._dialect.within(self._table.c.digest, digests, FieldKind.TEXT)
                statement = delete(self._table).where(self._mine, condition)
                await self._session.write(lambda connection: connection.execute(statement))

    @override
    async def size(self) -> int:
        async with self._tracked("size"):
            statement = select(func.count()).select_from(self._table).where(self._mine)
            return await self._session.read(lambda connection: _scalar(connection, statement))


async def _any(connection: AsyncConnection, statement: Any) -> bool:
    return (await connection.execute(statement)).first() is not None


async def _scalar(connection: AsyncConnection, statement: Any) -> Any:
    return (await connection.execute(statement)).scalar_one()
