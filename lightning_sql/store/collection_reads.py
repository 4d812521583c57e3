"""Everything that a store over collections is asked without changing it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from typing_extensions import override

from lightning_sql.collections.protocols import Collection as RecordCollection
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.collections.tracking import store_method
from lightning_sql.errors import InvalidRequestError
from lightning_sql.filters import FilterOptions, SortOptions
from lightning_sql.records import (
    Attempt,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Span,
    Worker,
    WorkerStatus,
)
from lightning_sql.store.interface import (
    FilterLogic,
    LightningStore,
    SortOrder,
    StoreStatistics,
)
from lightning_sql.store.transaction import (
    LATEST,
    attempted,
    latest_attempts,
)
from lightning_sql.store.watchdog import ScanGate

__all__ = ["CollectionReads"]

R = TypeVar("R")


def _check_page(limit: int, offset: int) -> None:
    if limit == 0 or limit < -1:
        raise InvalidRequestError("limit must be -1 (unlimited) or at least 1")
    if offset < 0:
        raise InvalidRequestError("offset must be at least 0")


def _sort(sort_by: str | None, sort_order: SortOrder) -> SortOptions | None:
    return None if sort_by is None else {"name": sort_by, "order": sort_order}


class CollectionReads(LightningStore):
    """The reading half of `CollectionStore`: each answer is of one state of the collections."""

    def __init__(self, collections: LightningCollections, gate: ScanGate) -> None:
        self._collections = collections
        self._gate = gate
        self._started = time.monotonic()

    @override
    async def statistics(self) -> StoreStatistics:
        async def count(collections: LightningCollections) -> StoreStatistics:
            return {
                "name": type(self).__name__,
                "total_rollouts": await collections.rollouts.size(),
                "total_attempts": await collections.attempts.size(),
                "total_spans": await collections.spans.size(),
                "total_resources": await collections.resources.size(),
                "total_workers": await collections.workers.size(),
                "uptime": time.monotonic() - self._started,
            }

        return await self._read("statistics", count)

    @override
    async def ping(self) -> None:
        await self._collections.now()

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
        _check_page(limit, offset)
        await self._gate.pass_through()
        filter_: FilterOptions = {
            "status": {"within": status if status_in is None else status_in},
            "rollout_id": {
                "within": rollout_ids if rollout_id_in is None else rollout_id_in,
                "contains": rollout_id_contains,
            },
            "_aggregate": filter_logic,
        }

        async def query(collections: LightningCollections) -> PaginatedResult[Rollout]:
            page = await collections.rollouts.query(filter_, _sort(sort_by, sort_order), limit, offset)
            return page.model_copy(update={"items": await self._with_attempts(collections, page.items)})

        return await self._read("query_rollouts", query)

    @override
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        await self._gate.pass_through()

        async def get(collections: LightningCollections) -> Rollout | None:
            rollout = await collections.rollouts.get({"rollout_id": {"exact": rollout_id}})
            return None if rollout is None else (await self._with_attempts(collections, [rollout]))[0]

        return await self._read("get_rollout_by_id", get)

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
        _check_page(limit, offset)
        await self._gate.pass_through()
        return await self._page(
            "query_attempts",
            lambda collections: collections.attempts,
            {"rollout_id": {"exact": rollout_id}},
            _sort(sort_by, sort_order),
            limit,
            offset,
        )

    @override
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        await self._gate.pass_through()

        async def get(collections: LightningCollections) -> Attempt | None:
            return (await latest_attempts(collections, [rollout_id])).get(rollout_id)

        return await self._read("get_latest_attempt", get)

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
        _check_page(limit, offset)
        await self._gate.pass_through()

        async def query(collections: LightningCollections) -> PaginatedResult[Span]:
            must: dict[str, Any] = {"rollout_id": {"exact": rollout_id}}
            if attempt_id == LATEST:
                latest = (await latest_attempts(collections, [rollout_id])).get(rollout_id)
                # Without an attempt there is no span either, so the empty set is the right one to look in.
                must["attempt_id"] = {"within": [] if latest is None else [latest.attempt_id]}
            elif attempt_id is not None:
                must["attempt_id"] = {"exact": attempt_id}
            filter_: FilterOptions = {
                "trace_id": {"exact": trace_id, "contains": trace_id_contains},
                "span_id": {"exact": span_id, "contains": span_id_contains},
                "parent_id": {"exact": parent_id, "contains": parent_id_contains},
                "name": {"exact": name, "contains": name_contains},
                "_aggregate": filter_logic,
                "_must": must,
            }
            return await collections.spans.query(filter_, _sort(sort_by, sort_order), limit, offset)

        return await self._read("query_spans", query)

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
        _check_page(limit, offset)
        return await self._page(
            "query_resources",
            lambda collections: collections.resources,
            {"resources_id": {"exact": resources_id, "contains": resources_id_contains}},
            _sort(sort_by, sort_order),
            limit,
            offset,
        )

    @override
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        async def get(collections: LightningCollections) -> ResourcesUpdate | None:
            return await collections.resources.get({"resources_id": {"exact": resources_id}})

        return await self._read("get_resources_by_id", get)

    @override
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read("get_latest_resources", self._latest_resources)

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
        _check_page(limit, offset)
        await self._gate.pass_through()
        return await self._page(
            "query_workers",
            lambda collections: collections.workers,
            {
                "status": {"within": status_in},
                "worker_id": {"contains": worker_id_contains},
                "_aggregate": filter_logic,
            },
            _sort(sort_by, sort_order),
            limit,
            offset,
        )

    @override
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        async def get(collections: LightningCollections) -> Worker | None:
            return await collections.workers.get({"worker_id": {"exact": worker_id}})

        return await self._read("get_worker_by_id", get)

    async def _read(self, name: str, callback: Callable[[LightningCollections], Awaitable[R]]) -> R:
        token = store_method.set((name, name))
        try:
            return await self._collections.execute(callback, mode="r", snapshot=True)
        finally:
            store_method.reset(token)

    async def _page(
        self,
        name: str,
        collection: Callable[[LightningCollections], RecordCollection[Any]],
        filter_: FilterOptions,
        sort: SortOptions | None,
        limit: int,
        offset: int,
    ) -> PaginatedResult[Any]:
        async def query(collections: LightningCollections) -> PaginatedResult[Any]:
            return await collection(collections).query(filter_, sort, limit, offset)

        return await self._read(name, query)

    async def _with_attempts(self, collections: LightningCollections, rollouts: Sequence[Rollout]) -> list[Rollout]:
        latest = await latest_attempts(collections, [rollout.rollout_id for rollout in rollouts])
        return [
            attempted(rollout, latest[rollout.rollout_id]) if rollout.rollout_id in latest else rollout
            for rollout in rollouts
        ]

    async def _latest_resources(self, collections: LightningCollections) -> ResourcesUpdate | None:
        return await collections.resources.get(sort={"name": "update_time", "order": "desc"})
