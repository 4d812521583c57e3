"""The native store's way to SQLite: every operation is one hop to a thread, and one transaction there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Cursor
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Executable, Integer, Table, func, literal_column, select
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from typing_extensions import override

from lightning_sql.database.dialects import sqlite_rules as rules
from lightning_sql.database.dialects.base import CommitUnknownError, Failure
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    AttemptChanged,
    Claim,
    Enqueued,
    HotPath,
    KeyNote,
    RolloutDraft,
    Row,
    SpanBatch,
    SpanKey,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.dialects.sqlite_thread import Threads, open_threads
from lightning_sql.database.native import ROLLOUTS
from lightning_sql.database.payload import encode_text
from lightning_sql.database.reading import KeptReading, Reading
from lightning_sql.database.schema import PARTITION, SEQ

__all__ = ["SQLiteHotPath"]

R = TypeVar("R")

_DIALECT: Final = SQLiteDialect_pysqlite()


class SQLiteHotPath(HotPath):
    """One partition of one file. The time is the process's.

    Args:
        file: the database, prepared.
        pragmas: of every connection.
        partition: as the caller names it.
        classify: what an error of the driver means.
        join: whether operations that wait for the writer together may share a transaction.
        claim_timeout: how many seconds nothing need be heard of an attempt after its claim.
    """

    in_order = True

    def __init__(
        self,
        file: Path,
        pragmas: Mapping[str, str],
        partition: str,
        classify: Callable[[BaseException], Failure],
        *,
        join: bool,
        claim_timeout: float | None = None,
    ) -> None:
        self._claim_timeout = claim_timeout
        self._file = file
        self._join = join
        self._pragmas = pragmas
        self._name = partition
        self._partition = encode_text(partition)
        self._classify = classify
        self._threads: Threads | None = None
        self._abandon: weakref.finalize[..., SQLiteHotPath] | None = None

    def _here(self) -> Threads:
        threads = self._threads
        if threads is None or threads.is_inherited:
            threads = self._threads = open_threads(self._file, self._pragmas, self._classify)
            self._abandon = weakref.finalize(self, threads.abandon)
            self._abandon.atexit = False
        return threads

    async def _hot(self, work: Callable[[Cursor], R]) -> R:
        threads = self._here()
        return await (threads.hot(work) if self._join else threads.hot_alone(work))

    @override
    async def enqueue(
        self, drafts: Sequence[RolloutDraft], now: float | None, notes: Sequence[tuple[KeyNote, str]] = ()
    ) -> Enqueued:
        return await self._hot(lambda cursor: rules.enqueue(cursor, self._partition, drafts, now, notes))

    @override
    async def claim(self, claims: Sequence[Claim], now: float | None) -> tuple[float, list[list[Row]]]:
        return await self._hot(lambda cursor: rules.claim(cursor, self._partition, claims, now, self._claim_timeout))

    @override
    async def add_spans(self, batches: Sequence[SpanBatch], now: float | None) -> list[list[SpanOutcome]]:
        return await self._hot(lambda cursor: rules.add_spans(cursor, self._partition, batches, now))

    @override
    async def number_spans(self, spans: Sequence[SpanKey]) -> list[int | None]:
        return await self._hot(lambda cursor: rules.number_spans(cursor, self._partition, spans))

    @override
    async def update_attempts(self, changes: Sequence[AttemptChange], now: float | None) -> list[AttemptChanged | None]:
        return await self._hot(
            lambda cursor: rules.update_attempts(cursor, self._partition, changes, now, self._claim_timeout)
        )

    @override
    async def issue_numbers(self, counts: Mapping[str, int]) -> dict[str, int]:
        return await self._hot(lambda cursor: rules.issue_numbers(cursor, self._partition, counts))

    @override
    async def beat_workers(self, beats: Sequence[WorkerBeat], now: float | None) -> list[Row]:
        return await self._hot(lambda cursor: rules.beat_workers(cursor, self._partition, beats, now))

    @override
    async def rollouts(self, rollout_ids: Sequence[str], finished: bool) -> list[Row]:
        return await self._here().hot_read(
            lambda cursor: rules.rollouts(cursor, self._partition, rollout_ids, finished=finished)
        )

    @override
    async def fetch(self, statement: Executable) -> Sequence[Row]:
        return await self._here().fetch(statement)

    @override
    async def fetch_bounded(
        self, reading: Reading, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> tuple[Sequence[Row], bool]:
        if isinstance(reading, KeptReading):
            sql, arguments = reading.on(_DIALECT, values)
            return await self._here().fetch_text(sql, arguments, most_bytes, heavy)
        return await self._here().fetch_bounded(reading.statement, values, most_bytes, heavy)

    @override
    async def read(self, work: Callable[[Connection], R]) -> R:
        return await self._here().cold_read(work)

    @override
    async def write(self, work: Callable[[Connection], R]) -> R:
        return await self._here().cold(work)

    @override
    async def is_over(self, error: CommitUnknownError) -> bool:
        return True  # its connection was closed, here, before the error was told

    @override
    async def took_place(self, error: CommitUnknownError) -> bool | None:
        return None

    @override
    def next_order(self, table: Table) -> ColumnElement[int]:
        # Row numbers keep the order of insertion, so the last row has the highest; this needs no index.
        last = select(func.max(literal_column("rowid", Integer))).select_from(table.alias("rows")).scalar_subquery()
        newest = table.alias("newest")
        order = select(newest.c[SEQ]).where(literal_column("newest.rowid") == last).correlate(None).scalar_subquery()
        return func.coalesce(order, 0) + 1

    @override
    def next_queue_position(self) -> ColumnElement[int]:
        queued = ROLLOUTS.alias("queued")
        last = select(func.max(queued.c.queue_position)).where(
            queued.c[PARTITION] == self._name, queued.c.queue_position.is_not(None)
        )
        return func.coalesce(last.correlate(None).scalar_subquery(), 0) + 1

    @override
    def connections(self) -> tuple[int, int]:
        return (0, 0) if self._threads is None else self._threads.connections()

    @override
    def clock(self) -> ColumnElement[float] | None:
        return None

    @override
    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is None or threads.is_inherited:
            return
        if self._abandon is not None:
            self._abandon.detach()
        await threads.release()
