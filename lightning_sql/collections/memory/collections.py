"""`LightningCollections` in memory: label locks order whole transactions."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from typing_extensions import override

from lightning_sql.collections import checks
from lightning_sql.collections.memory.collection import MemoryCollection
from lightning_sql.collections.memory.journal import Undo, undone_on_error
from lightning_sql.collections.memory.key_value import MemoryKeyValue
from lightning_sql.collections.memory.queue import MemoryQueue
from lightning_sql.collections.protocols import (
    AtomicLabel,
    AtomicMode,
    Collection,
    KeyValue,
    LightningCollections,
    Queue,
)
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.records import Attempt, ResourcesUpdate, Rollout, Span, Worker

__all__ = ["MemoryCollections"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")


class MemoryCollections(LightningCollections):
    """All collections of a store in process memory, for one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.time, tracker: MetricsTracker | None = None) -> None:
        super().__init__(tracker)
        self._clock = clock
        self._locks: dict[AtomicLabel, asyncio.Lock] = {label: asyncio.Lock() for label in checks.check_labels(None)}

        def common(label: AtomicLabel) -> dict[str, Any]:
            return {"tracker": tracker, "lock": self._locks[label], "name": label}

        self._rollouts = MemoryCollection(Rollout, ["rollout_id"], index_fields=["status"], **common("rollouts"))
        self._attempts = MemoryCollection(Attempt, ["rollout_id", "attempt_id"], **common("attempts"))
        self._spans = MemoryCollection(Span, ["rollout_id", "attempt_id", "span_id"], **common("spans"))
        self._resources = MemoryCollection(ResourcesUpdate, ["resources_id"], **common("resources"))
        self._workers = MemoryCollection(Worker, ["worker_id"], **common("workers"))
        self._rollout_queue = MemoryQueue(str, **common("rollout_queue"))
        self._span_sequence_ids = MemoryKeyValue[str, int](**common("span_sequence_ids"))

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
            with undone_on_error(journal):
                yield self._bound(journal)

    def _bound(self, journal: list[Undo]) -> Self:
        view = copy.copy(self)
        view._rollouts = self._rollouts.bound(journal)
        view._attempts = self._attempts.bound(journal)
        view._spans = self._spans.bound(journal)
        view._resources = self._resources.bound(journal)
        view._workers = self._workers.bound(journal)
        view._rollout_queue = self._rollout_queue.bound(journal)
        view._span_sequence_ids = self._span_sequence_ids.bound(journal)
        return view
