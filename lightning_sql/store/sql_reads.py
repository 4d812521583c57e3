"""Everything that the native store is asked without changing it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, BindParameter, Select, bindparam, func, select
from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.dialects.hot import Row
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    RESOURCES,
    RESOURCES_COLUMNS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SPANS,
    WORKER_COLUMNS,
    WORKERS,
    raw_columns,
)
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.database.reading import KeptReading
from lightning_sql.database.schema import PARTITION
from lightning_sql.fields import FieldKind
from lightning_sql.records import (
    ROLLOUT_ACTIVE,
    ROLLOUT_FINISHED,
    ROLLOUT_QUEUED,
    Attempt,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Span,
    Worker,
    WorkerStatus,
)
from lightning_sql.store.interface import FilterLogic, LightningStore, QueueState, SortOrder, StoreStatistics, Usage
from lightning_sql.store.measured import record_lag
from lightning_sql.store.row_store import RolloutQuery, RowPage, RowStore, SpanQuery
from lightning_sql.store.rows import attempt_of, attempted_of, resources_of, rollout_of, span_of, worker_of
from lightning_sql.store.sql_lanes import Lanes
from lightning_sql.store.sql_pages import CHUNK_BYTES, Pages
from lightning_sql.store.waiting import FinishWatcher

__all__ = ["SqlReads"]

_WIDTH: Final = len(ROLLOUT_COLUMNS)


def any_rollout(row: Row) -> Rollout:
    """A rollout from a row that continues with its latest attempt, if there is one."""
    return rollout_of(row) if row[_WIDTH] is None else attempted_of(row, attempt_of(row[_WIDTH:]))


_END_TIME: Final = ROLLOUT_COLUMNS.index("end_time")
_MOST_DUE: Final = 10_000
"""Rollouts over their limits are counted up to here."""


class SqlReads(LightningStore, RowStore):
    """The reading half of `SqlStore`: each answer, and each chunk of a long one, is of one state of the database."""

    def __init__(self, dialect: Dialect, partition: str) -> None:
        self._dialect = dialect
        self._partition = partition
        self._pages = Pages(dialect, partition)
        named = RESOURCES.c.resources_id == bindparam("resources_id", type_=RESOURCES.c.resources_id.type)
        self._resources_by_id = self._one_resources(named)
        self._latest_resources = self._one_resources()
        self._in_queue = KeptReading(self._count_of_queue(bindparam("most", type_=BigInteger())))
        self._started = time.monotonic()

    @property
    @abstractmethod
    def _lanes(self) -> Lanes:
        """The way to the database of the running event loop."""

    @property
    @abstractmethod
    def _watcher(self) -> FinishWatcher:
        """Who wakes the waiters of the running event loop."""

    @abstractmethod
    async def _pass_gate(self) -> None:
        """Let the watchdog look if it is time."""

    @property
    @override
    def rows(self) -> RowStore | None:
        return self

    @override
    async def statistics(self) -> StoreStatistics:
        tables = (ROLLOUTS, ATTEMPTS, SPANS, RESOURCES, WORKERS)
        counts = [
            select(func.count()).select_from(table).where(table.c[PARTITION] == self._partition).scalar_subquery()
            for table in tables
        ]
        [row] = await self._lanes.fetch(select(*counts))
        return {
            "name": type(self).__name__,
            "total_rollouts": row[0],
            "total_attempts": row[1],
            "total_spans": row[2],
            "total_resources": row[3],
            "total_workers": row[4],
            "uptime": time.monotonic() - self._started,
        }

    @override
    async def ping(self) -> None:
        await self._lanes.fetch(select(1))

    @override
    async def queue_state(self) -> QueueState:
        lanes, statuses = self._lanes, sorted(ROLLOUT_QUEUED | ROLLOUT_ACTIVE)
        rows = await lanes.fetch(
            select(ROLLOUTS.c.status, func.count(), func.min(ROLLOUTS.c.start_time))
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.status.in_(statuses))
            .group_by(ROLLOUTS.c.status),
            patient=False,
        )
        now = await lanes.instant()
        due = (
            select(ROLLOUTS.c.watch_at)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.watch_at <= now)
            .limit(_MOST_DUE)
            .subquery()
        )
        [[overdue]] = await lanes.fetch(select(func.count()).select_from(due), patient=False)
        queued = [row for row in rows if row[0] in ROLLOUT_QUEUED]
        return QueueState(
            queued=sum(row[1] for row in queued),
            oldest_seconds=max((now - row[2] for row in queued), default=0.0),
            running=sum(row[1] for row in rows if row[0] in ROLLOUT_ACTIVE),
            due=overdue,
        )

    @override
    def usage(self) -> Usage:
        return self._lanes.usage()

    # Rollouts

    def _count_of_queue(self, most: int | BindParameter[int]) -> Select[int]:
        queued = (
            select(ROLLOUTS.c.queue_position)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.queue_position.is_not(None))
            .limit(most)
            .subquery()
        )
        return select(func.count()).select_from(queued)

    async def _queued(self, most: int) -> int:
        """How many rollouts are in the queue, counted up to `most`."""
        [[count]] = await self._lanes.fetch(self._count_of_queue(most))
        return count

    async def _look_into_queue(self, most: int) -> int:
        """As `_queued`, every few milliseconds."""
        await self._pass_gate()
        rows, _ = await self._lanes.fetch_bounded(self._in_queue, {"most": most}, CHUNK_BYTES, ())
        return rows[0][0]

    @override
    async def rollout_page(self, query: RolloutQuery) -> RowPage:
        await self._pass_gate()
        return await self._pages.rollouts(self._lanes, query)

    @override
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        page = await self.rollout_page(
            RolloutQuery(
                status_in=status if status_in is None else status_in,
                rollout_id_in=rollout_ids if rollout_id_in is None else rollout_id_in,
                rollout_id_contains=rollout_id_contains,
                filter_logic=filter_logic,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )
        items = [any_rollout(row) for row in await _all_rows(page)]
        return PaginatedResult[Rollout].model_construct(items=items, limit=limit, offset=offset, total=page.total or 0)

    @override
    async def rollout_row(self, rollout_id: str) -> Row | None:
        await self._pass_gate()
        found = await self._lanes.rollouts([encode_text(rollout_id)])
        return found[0] if found else None

    @override
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row = await self.rollout_row(rollout_id)
        return None if row is None else any_rollout(row)

    @override
    async def finished_rows(self, rollout_ids: Sequence[str], timeout: float | None) -> Sequence[Row]:
        await self._pass_gate()
        ids = [encode_text(rollout_id) for rollout_id in dict.fromkeys(rollout_ids)]
        pending: set[str] = set()
        if timeout is None or timeout > 0:
            within = self._dialect.within(ROLLOUTS.c.rollout_id, list(dict.fromkeys(rollout_ids)), FieldKind.TEXT)
            known = select(*raw_columns(ROLLOUTS, ("rollout_id", "status"))).where(
                ROLLOUTS.c[PARTITION] == self._partition, within
            )
            pending = {
                decode_text(rollout_id)
                for rollout_id, status in await self._lanes.fetch(known)
                if not lifecycle.is_finished(status)
            }
            if pending:
                await self._watcher.wait(pending, timeout)
        found = {row[0]: row for row in await self._lanes.rollouts(ids, finished=True)} if ids else {}
        if pending and self.recorder is not None:
            now = self._lanes.now()
            ends = [found[id_][_END_TIME] for id_ in map(encode_text, pending) if id_ in found]
            record_lag(self.recorder, len(pending), ends, time.time() if now is None else now)
        return [found[id_] for id_ in map(encode_text, rollout_ids) if id_ in found]

    @override
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        return [rollout_of(row) for row in await self.finished_rows(rollout_ids, timeout)]

    async def _find_finished(self, rollout_ids: Collection[str]) -> Iterable[str]:
        await self._pass_gate()
        statement = select(*raw_columns(ROLLOUTS, ("rollout_id",))).where(
            ROLLOUTS.c[PARTITION] == self._partition,
            self._dialect.within(ROLLOUTS.c.rollout_id, list(rollout_ids), FieldKind.TEXT),
            ROLLOUTS.c.status.in_(sorted(ROLLOUT_FINISHED)),
        )
        return [decode_text(row[0]) for row in await self._lanes.fetch(statement)]

    # Attempts

    @override
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        await self._pass_gate()
        rows, total = await self._pages.rows(
            self._lanes,
            ATTEMPTS,
            Attempt,
            ATTEMPT_COLUMNS,
            {"rollout_id": {"exact": rollout_id}},
            sort_by,
            sort_order,
            limit,
            offset,
            "sequence_id",
        )
        items = [attempt_of(row) for row in rows]
        return PaginatedResult[Attempt].model_construct(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        row = await self.rollout_row(rollout_id)
        return None if row is None or row[_WIDTH] is None else attempt_of(row[_WIDTH:])

    # Spans

    @override
    async def span_page(self, query: SpanQuery) -> RowPage:
        await self._pass_gate()
        return await self._pages.spans(self._lanes, query)

    @override
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        page = await self.span_page(
            SpanQuery(
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                trace_id=trace_id,
                trace_id_contains=trace_id_contains,
                span_id=span_id,
                span_id_contains=span_id_contains,
                parent_id=parent_id,
                parent_id_contains=parent_id_contains,
                name=name,
                name_contains=name_contains,
                filter_logic=filter_logic,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )
        items = [span_of(row) for row in await _all_rows(page)]
        return PaginatedResult[Span].model_construct(items=items, limit=limit, offset=offset, total=page.total or 0)

    # Resources and workers

    @override
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        rows, total = await self._pages.rows(
            self._lanes,
            RESOURCES,
            ResourcesUpdate,
            RESOURCES_COLUMNS,
            {"resources_id": {"exact": resources_id, "contains": resources_id_contains}},
            sort_by,
            sort_order,
            limit,
            offset,
        )
        items = [resources_of(row) for row in rows]
        return PaginatedResult[ResourcesUpdate].model_construct(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        row = await self.resources_row(resources_id)
        return None if row is None else resources_of(row)

    @override
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        row = await self.latest_resources_row()
        return None if row is None else resources_of(row)

    @override
    async def resources_row(self, resources_id: str) -> Row | None:
        return await self._row(self._resources_by_id, {"resources_id": resources_id})

    @override
    async def latest_resources_row(self) -> Row | None:
        return await self._row(self._latest_resources, {})

    def _one_resources(self, *conditions: Any) -> KeptReading:
        # Every rollout begins with it.
        return KeptReading(
            select(*raw_columns(RESOURCES, RESOURCES_COLUMNS))
            .where(RESOURCES.c[PARTITION] == self._partition, *conditions)
            .order_by(RESOURCES.c.update_time.desc())
            .limit(1)
        )

    async def _row(self, reading: KeptReading, values: Mapping[str, Any]) -> Row | None:
        rows, _ = await self._lanes.fetch_bounded(reading, values, CHUNK_BYTES, ())
        return rows[0] if rows else None

    @override
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        await self._pass_gate()
        rows, total = await self._pages.rows(
            self._lanes,
            WORKERS,
            Worker,
            WORKER_COLUMNS,
            {
                "status": {"within": status_in},
                "worker_id": {"contains": worker_id_contains},
                "_aggregate": filter_logic,
            },
            sort_by,
            sort_order,
            limit,
            offset,
        )
        items = [worker_of(row) for row in rows]
        return PaginatedResult[Worker].model_construct(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        statement = select(*raw_columns(WORKERS, WORKER_COLUMNS)).where(
            WORKERS.c[PARTITION] == self._partition, WORKERS.c.worker_id == worker_id
        )
        found = await self._lanes.fetch(statement)
        return worker_of(found[0]) if found else None


async def _all_rows(page: RowPage) -> Sequence[Row]:
    if page.rest is None:
        return page.first
    rows = list(page.first)
    async for chunk in page.rest:
        rows += chunk
    return rows
