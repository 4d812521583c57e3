"""`LightningCollections` in SQL: transactions, locks by label, retries."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from lightning_sql import records
from lightning_sql.collections import checks
from lightning_sql.collections.protocols import AtomicLabel, AtomicMode, LightningCollections
from lightning_sql.collections.sql.collection import SqlCollection
from lightning_sql.collections.sql.key_value import SqlKeyValue
from lightning_sql.collections.sql.queue import SqlQueue
from lightning_sql.collections.sql.session import Session
from lightning_sql.collections.tracking import MetricsTracker
from lightning_sql.database import schema
from lightning_sql.database.engine import Database, lock_key
from lightning_sql.errors import DuplicatedPrimaryKeyError

__all__ = ["ItemTypes", "SqlCollections"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ItemTypes:
    """The pydantic models of the five collections: ours, or another library's with the same fields."""

    rollout: type[BaseModel] = records.Rollout
    attempt: type[BaseModel] = records.Attempt
    span: type[BaseModel] = records.Span
    resources: type[BaseModel] = records.ResourcesUpdate
    worker: type[BaseModel] = records.Worker


class SqlCollections(LightningCollections):
    """The collections of one partition of a database.

    Outside `atomic` each operation is a transaction of its own.

    Args:
        database: closed with these collections.
        partition: one training run, or one tenant; nothing is seen across partitions.
        item_types: the models of the items.
        duplicate_error: what an existing key raises.
        clock: seconds since the epoch; None is the database's clock on PostgreSQL, the process's on SQLite.
    """

    def __init__(
        self,
        database: Database,
        *,
        partition: str = "default",
        item_types: ItemTypes | None = None,
        duplicate_error: type[Exception] = DuplicatedPrimaryKeyError,
        clock: Callable[[], float] | None = None,
        tracker: MetricsTracker | None = None,
    ) -> None:
        super().__init__(tracker)
        self._database = database
        self._partition = partition
        self._clock = clock
        self._session = Session(database, partition)
        self._instant: float | None = None
        types = item_types or ItemTypes()

        def collection(table: Any, item_type: type[BaseModel], *keys: str) -> SqlCollection[Any]:
            return SqlCollection(
                self._session, table, item_type, keys, duplicate_error=duplicate_error, tracker=tracker
            )

        self._rollouts = collection(schema.ROLLOUTS, types.rollout, "rollout_id")
        self._attempts = collection(schema.ATTEMPTS, types.attempt, "rollout_id", "attempt_id")
        self._spans = collection(schema.SPANS, types.span, "rollout_id", "attempt_id", "span_id")
        self._resources = collection(schema.RESOURCES, types.resources, "resources_id")
        self._workers = collection(schema.WORKERS, types.worker, "worker_id")
        self._rollout_queue = SqlQueue(self._session, schema.QUEUE, str, tracker=tracker)
        self._span_sequence_ids = SqlKeyValue[str, int](self._session, schema.COUNTERS, tracker=tracker)

    @override
    async def close(self) -> None:
        """Wait for what is running and close the database's connections."""
        await self._database.close()

    @property
    @override
    def rollouts(self) -> SqlCollection[Any]:
        return self._rollouts

    @property
    @override
    def attempts(self) -> SqlCollection[Any]:
        return self._attempts

    @property
    @override
    def spans(self) -> SqlCollection[Any]:
        return self._spans

    @property
    @override
    def resources(self) -> SqlCollection[Any]:
        return self._resources

    @property
    @override
    def workers(self) -> SqlCollection[Any]:
        return self._workers

    @property
    @override
    def rollout_queue(self) -> SqlQueue[str]:
        return self._rollout_queue

    @property
    @override
    def span_sequence_ids(self) -> SqlKeyValue[str, int]:
        return self._span_sequence_ids

    @override
    async def now(self) -> float:
        if self._instant is not None:
            return self._instant
        statement = self._database.dialect.now()
        if statement is None or self._clock is not None:
            return time.time() if self._clock is None else self._clock()

        async def ask(connection: AsyncConnection) -> float:
            return (await connection.execute(statement)).scalar_one()

        return await self._session.read(ask)

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
        async with self._transaction(mode, snapshot and mode == "r", labels) as collections:
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
        async def attempt() -> R:
            # A writer that reads a snapshot can lose against another one even though it waited for its
            # locks, since the snapshot is as old as the wait: only what may run again can have one.
            isolated = snapshot and (commit or mode == "r")
            async with self._transaction(mode, isolated, labels) as collections:
                return await callback(collections)

        # Reads change nothing, so they may always run again.
        return await self._database.run(attempt, retry=commit or mode == "r")

    @asynccontextmanager
    async def _transaction(
        self, mode: AtomicMode, snapshot: bool, labels: Iterable[AtomicLabel] | None
    ) -> AsyncGenerator[Self]:
        wanted = checks.check_labels(labels)
        writing = mode != "r"
        async with self._database.transaction(writing=writing, snapshot=snapshot) as connection:
            view = self._bound(connection)
            if writing:
                view._instant = await self._lock(connection, wanted)
            yield view

    async def _lock(self, connection: AsyncConnection, labels: Iterable[AtomicLabel]) -> float:
        """Take the locks of the labels, in order; the time after that."""
        statement = self._database.dialect.lock([lock_key(self._partition, label) for label in labels])
        with self._database.translated():
            instant = None if statement is None else (await connection.execute(statement)).one()[-1]
        if self._clock is not None:
            return self._clock()
        return time.time() if instant is None else instant

    def _bound(self, connection: AsyncConnection) -> Self:
        view = copy.copy(self)
        session = Session(self._database, self._partition, connection)
        view._session = session
        view._rollouts = self._rollouts.bound(session)
        view._attempts = self._attempts.bound(session)
        view._spans = self._spans.bound(session)
        view._resources = self._resources.bound(session)
        view._workers = self._workers.bound(session)
        view._rollout_queue = self._rollout_queue.bound(session)
        view._span_sequence_ids = self._span_sequence_ids.bound(session)
        return view
