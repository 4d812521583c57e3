"""`KeyValue` in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import TypeVar, cast

from pydantic import BaseModel
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.memory.journal import Container, Undo, snapshot_of
from lightning_sql.collections.protocols import (
    KeyValue,
)
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.errors import UnstorableValueError

__all__ = ["MemoryKeyValue"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")


class MemoryKeyValue(Container[dict[K, V]], KeyValue[K, V]):
    """Values by key in memory."""

    def __init__(
        self,
        values: Mapping[K, V] | None = None,
        *,
        tracker: MetricsTracker | None = None,
        lock: asyncio.Lock | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(tracker, name)
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
            return snapshot_of(self._state.get(key, default))

    @override
    async def set(self, key: K, value: V) -> None:
        async with self.tracking_context("set", self.collection_name), self._writing() as journal:
            self._put(key, snapshot_of(value), journal)

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
