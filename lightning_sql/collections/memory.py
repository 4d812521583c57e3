"""The reference backend: plain objects in process memory, with real transactions.

Every write keeps a journal of what undoes it, so that a failed call or an `atomic` whose body
raises leaves no trace. Nothing here suspends while it works: on one event loop each operation is
atomic by itself, and the label locks order whole transactions.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Generic, Self, TypeVar, cast

from pydantic import BaseModel
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.protocols import (
    AtomicLabel,
    AtomicMode,
    Collection,
    KeyValue,
    LightningCollections,
    Queue,
)
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.errors import DuplicatedPrimaryKeyError, RecordNotFoundError, UnstorableValueError
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
from lightning_sql.records import Attempt, PaginatedResult, ResourcesUpdate, Rollout, Span, Worker

__all__ = ["MemoryCollection", "MemoryCollections", "MemoryKeyValue", "MemoryQueue"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")

Key = tuple[Hashable, ...]
Undo = Callable[[], None]


@contextmanager
def _undone_on_error(journal: list[Undo]) -> Generator[None]:
    """Undo what the body added to the journal if it raises."""
    mark = len(journal)
    try:
        yield
    except BaseException:
        while len(journal) > mark:
            journal.pop()()
        raise


class _Container(Generic[S]):
    """State that several views share: one outside any transaction, one for each open transaction."""

    _state: S
    _journal: list[Undo] | None
    _lock: asyncio.Lock

    def bound(self, journal: list[Undo]) -> Self:
        view = copy.copy(self)
        view._journal = journal
        return view

    @asynccontextmanager
    async def _writing(self) -> AsyncGenerator[list[Undo]]:
        if self._journal is not None:
            with _undone_on_error(self._journal):
                yield self._journal
            return
        async with self._lock:
            journal: list[Undo] = []
            with _undone_on_error(journal):
                yield journal


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


class MemoryCollection(_Container[_Table[T]], Collection[T]):
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
    ) -> None:
        super().__init__(tracker)
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


class _Entries(Generic[Q]):
    """The entries of a queue, oldest first, by a number that only grows."""

    def __init__(self) -> None:
        self.entries: dict[int, Q] = {}
        self.count = 0

    def append(self, item: Q, journal: list[Undo]) -> None:
        self.count += 1
        number = self.count
        self.entries[number] = item
        journal.append(lambda: self.entries.__delitem__(number))

    def remove(self, number: int, journal: list[Undo]) -> Q:
        item = self.entries.pop(number)

        def undo() -> None:
            self.entries = dict(sorted([*self.entries.items(), (number, item)], key=lambda entry: entry[0]))

        journal.append(undo)
        return item


class MemoryQueue(_Container[_Entries[Q]], Queue[Q]):
    """A queue in memory."""

    def __init__(
        self,
        item_type: type[Q],
        items: Iterable[Q] = (),
        *,
        tracker: MetricsTracker | None = None,
        lock: asyncio.Lock | None = None,
    ) -> None:
        super().__init__(tracker)
        self._item_type = item_type
        self._state = _Entries[Q]()
        self._journal = None
        self._lock = lock or asyncio.Lock()
        for item in checks.check_items(items, item_type):
            self._state.append(_snapshot(item), [])

    @override
    def item_type(self) -> type[Q]:
        return self._item_type

    @override
    async def has(self, item: Q) -> bool:
        checks.check_items([item], self._item_type)
        async with self.tracking_context("has", self.collection_name):
            return item in self._state.entries.values()

    @override
    async def enqueue(self, items: Sequence[Q]) -> Sequence[Q]:
        checked = checks.check_items(items, self._item_type)
        async with self.tracking_context("enqueue", self.collection_name), self._writing() as journal:
            for item in checked:
                self._state.append(_snapshot(item), journal)
            return items

    @override
    async def dequeue(self, limit: int = 1) -> Sequence[Q]:
        async with self.tracking_context("dequeue", self.collection_name), self._writing() as journal:
            return [self._state.remove(number, journal) for number in self._first(limit)]

    @override
    async def peek(self, limit: int = 1) -> Sequence[Q]:
        async with self.tracking_context("peek", self.collection_name):
            return [_snapshot(self._state.entries[number]) for number in self._first(limit)]

    def _first(self, limit: int) -> list[int]:
        return [number for number, _ in zip(self._state.entries, range(limit), strict=False)]

    @override
    async def discard(self, items: Sequence[Q]) -> None:
        checked = checks.check_items(items, self._item_type)
        async with self.tracking_context("discard", self.collection_name), self._writing() as journal:
            for number in [number for number, item in self._state.entries.items() if item in checked]:
                self._state.remove(number, journal)

    @override
    async def size(self) -> int:
        async with self.tracking_context("size", self.collection_name):
            return len(self._state.entries)


class MemoryKeyValue(_Container[dict[K, V]], KeyValue[K, V]):
    """Values by key in memory."""

    def __init__(
        self,
        values: Mapping[K, V] | None = None,
        *,
        tracker: MetricsTracker | None = None,
        lock: asyncio.Lock | None = None,
    ) -> None:
        super().__init__(tracker)
        self._state = dict(values or {})
        self._journal = None
        self._lock = lock or asyncio.Lock()

    @override
    async def has(self, key: K) -> bool:
        async with self.tracking_context("has", self.collection_name):
            return key in self._state

    @override
    async def get(self, key: K, default: V | None = None) -> V | None:
        async with self.tracking_context("get", self.collection_name):
            return _snapshot(self._state.get(key, default))

    @override
    async def set(self, key: K, value: V) -> None:
        async with self.tracking_context("set", self.collection_name), self._writing() as journal:
            self._put(key, _snapshot(value), journal)

    @override
    async def inc(self, key: K, amount: V) -> V:
        delta = checks.check_number(amount, "the amount")
        async with self.tracking_context("inc", self.collection_name), self._writing() as journal:
            total = checks.check_number(self._state.get(key, 0), "the stored value") + delta
            return self._put(key, cast(V, _fitting(total)), journal)

    @override
    async def chmax(self, key: K, value: V) -> V:
        wanted = checks.check_number(value, "the value")
        async with self.tracking_context("chmax", self.collection_name), self._writing() as journal:
            current = checks.check_number(self._state.get(key, wanted), "the stored value")
            return self._put(key, cast(V, max(current, _fitting(wanted))), journal)

    @override
    async def pop(self, key: K, default: V | None = None) -> V | None:
        async with self.tracking_context("pop", self.collection_name), self._writing() as journal:
            if key not in self._state:
                return default
            value = self._state.pop(key)
            journal.append(lambda: self._state.__setitem__(key, value))
            return value

    @override
    async def size(self) -> int:
        async with self.tracking_context("size", self.collection_name):
            return len(self._state)

    def _put(self, key: K, value: V, journal: list[Undo]) -> V:
        known, old = key in self._state, self._state.get(key)
        self._state[key] = value
        journal.append(lambda: self._state.__setitem__(key, cast(V, old)) if known else self._state.__delitem__(key))
        return value


def _fitting(value: float) -> int | float:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UnstorableValueError("a counter does not fit 64 bits")
    return value


def _snapshot(value: Q) -> Q:
    return value if isinstance(value, str | int | float | None) else copy.deepcopy(value)


class MemoryCollections(LightningCollections):
    """All collections of a store in process memory, for one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.time, tracker: MetricsTracker | None = None) -> None:
        super().__init__(tracker)
        self._clock = clock
        self._locks: dict[AtomicLabel, asyncio.Lock] = {label: asyncio.Lock() for label in checks.check_labels(None)}
        locks = self._locks
        self._rollouts = MemoryCollection(
            Rollout, ["rollout_id"], index_fields=["status"], tracker=tracker, lock=locks["rollouts"]
        )
        self._attempts = MemoryCollection(
            Attempt, ["rollout_id", "attempt_id"], tracker=tracker, lock=locks["attempts"]
        )
        self._spans = MemoryCollection(
            Span, ["rollout_id", "attempt_id", "span_id"], tracker=tracker, lock=locks["spans"]
        )
        self._resources = MemoryCollection(ResourcesUpdate, ["resources_id"], tracker=tracker, lock=locks["resources"])
        self._workers = MemoryCollection(Worker, ["worker_id"], tracker=tracker, lock=locks["workers"])
        self._rollout_queue = MemoryQueue(str, tracker=tracker, lock=locks["rollout_queue"])
        self._span_sequence_ids = MemoryKeyValue[str, int](tracker=tracker, lock=locks["span_sequence_ids"])

    @property
    @override
    def rollouts(self) -> Collection[Rollout]:
        return self._rollouts

    @property
    @override
    def attempts(self) -> Collection[Attempt]:
        return self._attempts

    @property
    @override
    def spans(self) -> Collection[Span]:
        return self._spans

    @property
    @override
    def resources(self) -> Collection[ResourcesUpdate]:
        return self._resources

    @property
    @override
    def workers(self) -> Collection[Worker]:
        return self._workers

    @property
    @override
    def rollout_queue(self) -> Queue[str]:
        return self._rollout_queue

    @property
    @override
    def span_sequence_ids(self) -> KeyValue[str, int]:
        return self._span_sequence_ids

    @override
    async def now(self) -> float:
        return self._clock()

    @asynccontextmanager
    @override
    async def atomic(
        self,
        *,
        mode: AtomicMode = "rw",
        snapshot: bool = False,
        commit: bool = False,
        labels: Iterable[AtomicLabel] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Self]:
        checks.check_not_committing(commit)
        async with self._transaction(mode, snapshot, labels) as collections:
            yield collections

    @override
    async def execute(
        self,
        callback: Callable[[Self], Awaitable[R]],
        *,
        mode: AtomicMode = "rw",
        snapshot: bool = False,
        commit: bool = False,
        labels: Iterable[AtomicLabel] | None = None,
        **kwargs: Any,
    ) -> R:
        async with self._transaction(mode, snapshot, labels) as collections:
            return await callback(collections)

    @asynccontextmanager
    async def _transaction(
        self, mode: AtomicMode, snapshot: bool, labels: Iterable[AtomicLabel] | None
    ) -> AsyncGenerator[Self]:
        wanted = checks.check_labels(labels)
        if mode == "r" and not snapshot:
            yield self
            return
        async with AsyncExitStack() as stack:
            for label in wanted:
                await stack.enter_async_context(self._locks[label])
            journal: list[Undo] = []
            with _undone_on_error(journal):
                yield self.bound(journal)

    def bound(self, journal: list[Undo]) -> Self:
        view = copy.copy(self)
        view._rollouts = self._rollouts.bound(journal)
        view._attempts = self._attempts.bound(journal)
        view._spans = self._spans.bound(journal)
        view._resources = self._resources.bound(journal)
        view._workers = self._workers.bound(journal)
        view._rollout_queue = self._rollout_queue.bound(journal)
        view._span_sequence_ids = self._span_sequence_ids.bound(journal)
        return view
