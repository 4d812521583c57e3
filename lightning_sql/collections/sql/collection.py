"""`Collection` over a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Table, and_, cast, column, delete, func, insert, select, update, values
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.protocols import Collection
from lightning_sql.collections.sql.conditions import Translation, order_by
from lightning_sql.collections.sql.rows import RowMapper
from lightning_sql.collections.sql.session import Row, Session, SqlContainer
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.database.schema import EXTRA, PARTITION, SEQ
from lightning_sql.errors import DuplicatedPrimaryKeyError, RecordNotFoundError
from lightning_sql.filters import (
    Filter,
    FilterOptions,
    Sort,
    SortOptions,
    field_value,
    matches,
    normalize_filter,
    normalize_sort,
    page_of,
)
from lightning_sql.records import PaginatedResult

__all__ = ["SqlCollection"]

T = TypeVar("T", bound=BaseModel)

Key = tuple[Any, ...]


class SqlCollection(SqlContainer, Collection[T]):
    """A collection of any pydantic items over a table made by `schema.collection_table`.

    Args:
        duplicate_error: raised for a key that exists; a store written for other collections may expect its own.
    """

    def __init__(
        self,
        session: Session,
        table: Table,
        item_type: type[T],
        primary_keys: Sequence[str],
        *,
        duplicate_error: type[Exception] = DuplicatedPrimaryKeyError,
        tracker: MetricsTracker | None = None,
    ) -> None:
        super().__init__(session, table, tracker)
        self._item_type = item_type
        self._primary_keys = checks.check_primary_keys(item_type, primary_keys)
        self._mapper = RowMapper(item_type, table)
        self._duplicate_error = duplicate_error

    @override
    def primary_keys(self) -> Sequence[str]:
        return self._primary_keys

    @override
    def item_type(self) -> type[T]:
        return self._item_type

    @override
    async def size(self) -> int:
        async with self._tracked("size"):
            return await self._session.read(lambda connection: self._count(connection, self._mine))

    async def _count(self, connection: AsyncConnection, where: ColumnElement[bool]) -> int:
        return (await connection.execute(select(func.count()).select_from(self._table).where(where))).scalar_one()

    # Reading

    @override
    async def query(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[T]:
        filter_ = normalize_filter(filter)
        order = normalize_sort(sort, self._item_type)
        async with self._tracked("query"):
            items, total = await self._session.read(
                lambda connection: self._page(connection, filter_, order, limit, offset)
            )
            return PaginatedResult[Any].model_construct(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
    ) -> T | None:
        filter_ = normalize_filter(filter)
        order = normalize_sort(sort, self._item_type)
        async with self._tracked("get"):
            items = await self._session.read(lambda connection: self._first(connection, filter_, order))
            return items[0] if items else None

    async def _first(self, connection: AsyncConnection, filter_: Filter, sort: Sort | None) -> Sequence[T]:
        translation = self._translate(filter_)
        if translation.inexact:
            return (await self._sifted(connection, filter_, translation, sort))[:1]
        return await self._select(connection, translation, sort, limit=1)

    async def _page(
        self, connection: AsyncConnection, filter_: Filter, sort: Sort | None, limit: int, offset: int
    ) -> tuple[Sequence[T], int]:
        translation = self._translate(filter_)
        if translation.inexact:
            found = await self._sifted(connection, filter_, translation, sort)
            return page_of(found, limit, offset), len(found)
        items = await self._select(connection, translation, sort, limit, offset)
        # A page that is not full, and not past the end, tells the total by itself.
        if (limit < 0 or len(items) < limit) and (items or offset == 0):
            return items, offset + len(items)
        return items, await self._count(connection, and_(self._mine, translation.where))

    def _translate(self, filter_: Filter) -> Translation:
        return Translation(filter_, self._table, self._item_type, self._dialect)

    async def _sifted(
        self, connection: AsyncConnection, filter_: Filter, translation: Translation, sort: Sort | None
    ) -> Sequence[T]:
        candidates = await self._select(connection, translation, sort)
        return [item for item in candidates if matches(filter_, lambda name, item=item: field_value(item, name))]

    async def _select(
        self,
        connection: AsyncConnection,
        translation: Translation,
        sort: Sort | None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[T]:
        if limit == 0:
            return []
        statement = (
            select(self._table)
            .where(self._mine, translation.where)
            .order_by(*order_by(sort, self._table, self._item_type))
        )
        if limit > 0:
            statement = statement.limit(limit)
        if offset > 0:
            statement = statement.offset(offset)
        return [self._mapper.item(row) for row in (await connection.execute(statement)).mappings()]

    # Writing

    @override
    async def insert(self, items: Sequence[T]) -> None:
        checked = checks.check_items(items, self._item_type)
        async with self._tracked("insert"):
            if not checked:
                return
            try:
                checks.check_unique(checks.key_of(item, self._primary_keys) for item in checked)
                rows = self._rows(checked)
                await self._session.write(lambda connection: connection.execute(insert(self._table), rows), undo=True)
            except DuplicatedPrimaryKeyError as error:
                if isinstance(error, self._duplicate_error):
                    raise
                raise self._duplicate_error(str(error)) from None

    @override
    async def update(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        checked = checks.check_items(items, self._item_type)
        fields = checks.check_update_fields(self._item_type, update_fields)
        async with self._tracked("update"):
            if not checked:
                return []
            return await self._session.write(
                lambda connection: self._in_rounds(connection, checked, fields, self._update, inserts=False),
                undo=len(checked) > 1,
            )

    @override
    async def upsert(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        checked = checks.check_items(items, self._item_type)
        fields = checks.check_update_fields(self._item_type, update_fields)
        async with self._tracked("upsert"):
            if not checked:
                return []
            return await self._session.write(
                lambda connection: self._in_rounds(connection, checked, fields, self._upsert, inserts=True),
                undo=len(checked) > 1,
            )

    @override
    async def delete(self, items: Sequence[T]) -> None:
        checked = checks.check_items(items, self._item_type)
        async with self._tracked("delete"):
            if checked:
                await self._session.write(lambda connection: self._delete(connection, checked), undo=len(checked) > 1)

    async def _in_rounds(
        self,
        connection: AsyncConnection,
        items: Sequence[T],
        fields: Sequence[str] | None,
        write: Callable[[AsyncConnection, Sequence[T], Sequence[str] | None], Awaitable[dict[Key, T]]],
        *,
        inserts: bool,
    ) -> Sequence[T]:
        """Write items in statements that each name a key at most once and carry a bounded number of values."""
        results: list[T | None] = [None] * len(items)
        for round_ in _rounds([checks.key_of(item, self._primary_keys) for item in items]):
            if not inserts:
                # In the order of keys, so that two calls that overlap cannot deadlock. What may be inserted
                # must keep the order that it was given in.
                round_.sort(key=lambda index: _sortable(checks.key_of(items[index], self._primary_keys)))
            for part in _parts(round_, self._batch_size):
                written = await write(connection, [items[index] for index in part], fields)
                for index in part:
                    key = checks.key_of(items[index], self._primary_keys)
                    if key not in written:
                        raise RecordNotFoundError(checks.missing_key_message(self._item_type, key))
                    results[index] = written[key]
        return [result for result in results if result is not None]

    @property
    def _batch_size(self) -> int:
        return max(1, self._dialect.parameters_per_statement // (len(self._table.c) + 1))

    def _rows(self, items: Iterable[T]) -> list[Row]:
        return [self._mapper.row(item, self._session.partition) for item in items]

    async def _returned(self, connection: AsyncConnection, statement: Any) -> dict[Key, T]:
        items = [self._mapper.item(row) for row in (await connection.execute(statement)).mappings()]
        return {checks.key_of(item, self._primary_keys): item for item in items}

    async def _update(
        self, connection: AsyncConnection, items: Sequence[T], fields: Sequence[str] | None
    ) -> dict[Key, T]:
        columns = [name for name in self._mapper.stored_columns(fields) if name not in self._primary_keys]
        if not columns:
            return await self._matching(connection, items)
        items = await self._merged(connection, items, fields)
        if len(items) == 1:
            [row] = self._rows(items)
            changed = update(self._table).where(self._mine, self._key_is(items[0]))
            statement = changed.values({name: row[name] for name in columns}).returning(self._table)
            return await self._returned(connection, statement)
        given = self._given(items, columns)
        statement = (
            update(self._table)
            .where(self._mine, *(self._table.c[name] == given.c[name] for name in self._primary_keys))
            # A column of nothing but NULLs has no type of its own.
            .values({name: cast(given.c[name], self._table.c[name].type) for name in columns})
            .returning(self._table)
        )
        return await self._returned(connection, statement)

    def _given(self, items: Sequence[T], columns: Sequence[str]) -> Any:
        names = [*self._primary_keys, *columns]
        rows = self._rows(items)
        return (
            values(*(column(name, self._table.c[name].type) for name in names), name="given")
            .data([tuple(row[name] for name in names) for row in rows])
            .cte("given")
        )

    def _key_is(self, item: T) -> ColumnElement[bool]:
        return and_(*(self._table.c[name] == getattr(item, name) for name in self._primary_keys))

    async def _matching(self, connection: AsyncConnection, items: Sequence[T]) -> dict[Key, T]:
        """Those of the items that are stored, as they are stored, and locked."""
        found: dict[Key, T] = {}
        for item in items:
            statement = select(self._table).where(self._mine, self._key_is(item)).with_for_update()
            found |= await self._returned(connection, statement)
        return found

    async def _merged(
        self, connection: AsyncConnection, items: Sequence[T], fields: Sequence[str] | None
    ) -> Sequence[T]:
        """The items, with what else stands in the column that fields without one of their own share."""
        if fields is None or EXTRA not in self._mapper.stored_columns(fields):
            return items
        stored = await self._matching(connection, items)
        merged: list[T] = []
        for item in items:
            known = stored.get(checks.key_of(item, self._primary_keys))
            given = {name: getattr(item, name) for name in fields}
            merged.append(item if known is None else known.model_copy(update=given))
        return merged

    async def _upsert(
        self, connection: AsyncConnection, items: Sequence[T], fields: Sequence[str] | None
    ) -> dict[Key, T]:
        columns = [name for name in self._mapper.stored_columns(fields) if name not in self._primary_keys]
        items = await self._merged(connection, items, fields)
        statement = self._dialect.upsert(self._table).values(self._rows(items))
        changes = {name: statement.excluded[name] for name in columns}
        # Writing the key over itself changes nothing, but makes RETURNING answer with the row.
        changes = changes or {PARTITION: self._table.c[PARTITION]}
        return await self._returned(
            connection,
            statement.on_conflict_do_update(index_elements=[PARTITION, *self._primary_keys], set_=changes).returning(
                *self._table.c
            ),
        )

    async def _delete(self, connection: AsyncConnection, items: Sequence[T]) -> None:
        for item in items:
            statement = delete(self._table).where(self._mine, self._key_is(item)).returning(self._table.c[SEQ])
            if (await connection.execute(statement)).first() is None:
                key = checks.key_of(item, self._primary_keys)
                raise RecordNotFoundError(checks.missing_key_message(self._item_type, key))


def _rounds(keys: Sequence[Key]) -> list[list[int]]:
    """Split the indexes of a call so that no round names a key twice; repeats of a key keep their order."""
    rounds: list[list[int]] = []
    seen: dict[Key, int] = {}
    for index, key in enumerate(keys):
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def _sortable(key: Key) -> tuple[tuple[str, Any], ...]:
    return tuple((type(value).__name__, value) for value in key)


def _parts(indexes: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indexes), size):
        yield indexes[start : start + size]
