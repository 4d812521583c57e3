"""`Collection` in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.memory.journal import Container, Undo
from lightning_sql.collections.protocols import (
    Collection,
)
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.errors import DuplicatedPrimaryKeyError, RecordNotFoundError
from lightning_sql.filters import (
    Condition,
    Filter,
    FilterOptions,
    SortOptions,
    field_value,
    matches,
    normalize_filter,
    normalize_sort,
    page_of,
    sort_items,
)
from lightning_sql.jsonable import copied
from lightning_sql.records import PaginatedResult

__all__ = ["MemoryCollection"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")


Key = tuple[Hashable, ...]


class _Table(Generic[T]):
    """Items by key in insertion order, with an index on some scalar fields."""

    def __init__(self, index_fields: Iterable[str]) -> None:
        self.items: dict[Key, T] = {}
        self.order: dict[Key, int] = {}
        self.indexes: dict[str, dict[Hashable, dict[Key, None]]] = {field: {} for field in index_fields}
        self.inserted = 0

    def put(self, key: Key, item: T, journal: list[Undo]) -> None:
        old = self.items.get(key)
        if old is None:
            self.inserted += 1
            self.order[key] = self.inserted
        self._set(key, item)
        journal.append(lambda: self._remove(key) if old is None else self._set(key, old))

    def remove(self, key: Key, journal: list[Undo]) -> None:
        item, order = self.items[key], self.order[key]
        self._remove(key)

        def undo() -> None:
            self.order[key] = order
            self._set(key, item)
            self.items = {k: self.items[k] for k in sorted(self.items, key=self.order.__getitem__)}

        journal.append(undo)

    def _set(self, key: Key, item: T) -> None:
        self._unindex(key)
        self.items[key] = item
        for field, index in self.indexes.items():
            index.setdefault(getattr(item, field), {})[key] = None

    def _remove(self, key: Key) -> None:
        self._unindex(key)
        del self.items[key], self.order[key]

    def _unindex(self, key: Key) -> None:
        item = self.items.get(key)
        if item is None:
            return
        for field, index in self.indexes.items():
            value = getattr(item, field)
            index[value].pop(key)
            if not index[value]:
                del index[value]

    def candidates(self, filter_: Filter) -> Iterable[T]:
        """The items that may match, in insertion order: from the narrowest index that applies, or all."""
        required = filter_.must if filter_.any_of else filter_.must + filter_.pool
        narrowest: list[Key] | None = None
        for condition in required:
            keys = self._look_up(condition)
            if keys is not None and (narrowest is None or len(keys) < len(narrowest)):
                narrowest = keys
        if narrowest is None:
            return self.items.values()
        return [self.items[key] for key in sorted(narrowest, key=self.order.__getitem__)]

    def _look_up(self, condition: Condition) -> list[Key] | None:
        index = self.indexes.get(condition.field)
        if index is None or condition.operator == "contains":
            return None
        values = condition.value if condition.operator == "within" else (condition.value,)
        try:
            return list(dict.fromkeys(key for value in values for key in index.get(value, ())))
        except TypeError:  # an unhashable value: compared one by one instead
            return None


class MemoryCollection(Container[_Table[T]], Collection[T]):
    """A collection in memory; items go in and come out as deep copies."""

    def __init__(
        self,
        item_type: type[T],
        primary_keys: Sequence[str],
        items: Iterable[T] = (),
        *,
        index_fields: Iterable[str] = (),
        tracker: MetricsTracker | None = None,
        lock: asyncio.Lock | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(tracker, name)
        self._item_type = item_type
        self._primary_keys = checks.check_primary_keys(item_type, primary_keys)
        self._state = _Table[T](dict.fromkeys([*self._primary_keys[:1], *index_fields]))
        self._journal = None
        self._lock = lock or asyncio.Lock()
        self._insert(checks.check_items(items, item_type), [])

    @override
    def primary_keys(self) -> Sequence[str]:
        return self._primary_keys

    @override
    def item_type(self) -> type[T]:
        return self._item_type

    @override
    async def size(self) -> int:
        async with self.tracking_context("size", self.collection_name):
            return len(self._state.items)

    @override
    async def query(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[T]:
        async with self.tracking_context("query", self.collection_name):
            found = self._find(filter, sort)
            items = [copied(item) for item in page_of(found, limit, offset)]
            return PaginatedResult[Any].model_construct(items=items, limit=limit, offset=offset, total=len(found))

    @override
    async def get(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
    ) -> T | None:
        async with self.tracking_context("get", self.collection_name):
            found = self._find(filter, sort)
            return copied(found[0]) if found else None

    def _find(self, options: FilterOptions | None, sort: SortOptions | None) -> list[T]:
        filter_ = normalize_filter(options)
        order = normalize_sort(sort, self._item_type)
        found = self._state.candidates(filter_)
        if not filter_.empty:
            found = [item for item in found if matches(filter_, lambda name, item=item: field_value(item, name))]
        return sort_items(found, order)

    @override
    async def insert(self, items: Sequence[T]) -> None:
        checked = checks.check_items(items, self._item_type)
        async with self.tracking_context("insert", self.collection_name), self._writing() as journal:
            self._insert(checked, journal)

    def _insert(self, items: Sequence[T], journal: list[Undo]) -> None:
        keys = [checks.key_of(item, self._primary_keys) for item in items]
        checks.check_unique(keys)
        for key in keys:
            if key in self._state.items:
                raise DuplicatedPrimaryKeyError(checks.duplicate_message(self._item_type, key))
        for key, item in zip(keys, items, strict=True):
            self._state.put(key, self._own(item), journal)

    @override
    async def update(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        checked = checks.check_items(items, self._item_type)
        fields = checks.check_update_fields(self._item_type, update_fields)
        async with self.tracking_context("update", self.collection_name), self._writing() as journal:
            return [self._update(item, fields, journal) for item in checked]

    @override
    async def upsert(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        checked = checks.check_items(items, self._item_type)
        fields = checks.check_update_fields(self._item_type, update_fields)
        async with self.tracking_context("upsert", self.collection_name), self._writing() as journal:
            results: list[T] = []
            for item in checked:
                key = checks.key_of(item, self._primary_keys)
                if key not in self._state.items:
                    self._state.put(key, self._own(item), journal)
                    results.append(copied(item))
                else:
                    results.append(self._update(item, fields, journal))
            return results

    def _update(self, item: T, fields: Sequence[str] | None, journal: list[Undo]) -> T:
        key = checks.key_of(item, self._primary_keys)
        current = self._state.items.get(key)
        if current is None:
            raise RecordNotFoundError(checks.missing_key_message(self._item_type, key))
        given = self._own(item)
        merged = given if fields is None else current.model_copy(update={name: getattr(given, name) for name in fields})
        self._state.put(key, merged, journal)
        return copied(merged)

    @override
    async def delete(self, items: Sequence[T]) -> None:
        checked = checks.check_items(items, self._item_type)
        async with self.tracking_context("delete", self.collection_name), self._writing() as journal:
            for item in checked:
                key = checks.key_of(item, self._primary_keys)
                if key not in self._state.items:
                    raise RecordNotFoundError(checks.missing_key_message(self._item_type, key))
                self._state.remove(key, journal)

    def _own(self, item: T) -> T:
        return copied(checks.project(item, self._item_type))
