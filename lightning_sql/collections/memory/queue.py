"""`Queue` in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from pydantic import BaseModel
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.memory.journal import Container, Undo, snapshot_of
from lightning_sql.collections.protocols import (
    Queue,
)
from lightning_sql.collections.tracking import MetricsTracker

__all__ = ["MemoryQueue"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")


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


class MemoryQueue(Container[_Entries[Q]], Queue[Q]):
    """A queue in memory."""

    def __init__(
        self,
        item_type: type[Q],
        items: Iterable[Q] = (),
        *,
        tracker: MetricsTracker | None = None,
        lock: asyncio.Lock | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(tracker, name)
        self._item_type = item_type
        self._state = _Entries[Q]()
        self._journal = None
        self._lock = lock or asyncio.Lock()
        for item in checks.check_items(items, item_type):
            self._state.append(snapshot_of(item), [])

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
                self._state.append(snapshot_of(item), journal)
            return items

    @override
    async def dequeue(self, limit: int = 1) -> Sequence[Q]:
        async with self.tracking_context("dequeue", self.collection_name), self._writing() as journal:
            return [self._state.remove(number, journal) for number in self._first(limit)]

    @override
    async def peek(self, limit: int = 1) -> Sequence[Q]:
        async with self.tracking_context("peek", self.collection_name):
            return [snapshot_of(self._state.entries[number]) for number in self._first(limit)]

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
