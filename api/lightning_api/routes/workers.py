"""Workers."""

from __future__ import annotations

from typing import Final

from lightning_api.calls import Call
from lightning_api.models import WorkerQuery, WorkerUpdate, changes_of
from lightning_api.operations import JsonBody, Nothing, Operation, QueryString, operation
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_sql.records import PaginatedResult, Worker
from lightning_sql.store import documents, row_json
from lightning_sql.store.row_store import RowStore

__all__ = ["OPERATIONS"]

_NOT_NULL: Final = frozenset({"heartbeat_stats"})


async def _query(call: Call, query: WorkerQuery) -> PaginatedResult[Worker]:
    page = await call.store.query_workers(
        status_in=query.status_in,
        worker_id_contains=query.worker_id_contains,
        filter_logic=query.filter_logic,
        **query.ordering(),
    )
    return query.as_requested(page)


@operation(
    "GET",
    "/v1/agl/workers",
    QueryString(WorkerQuery),
    returns=PaginatedResult[Worker],
    errors=(400, 503),
    tag="workers",
)
async def query_workers(call: Call, query: WorkerQuery) -> PaginatedResult[Worker]:
    """List workers."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/workers/search",
    JsonBody[WorkerQuery](WorkerQuery),
    returns=PaginatedResult[Worker],
    errors=(400, 503),
    tag="workers",
)
async def search_workers(call: Call, query: WorkerQuery) -> PaginatedResult[Worker]:
    """List workers, with the filters in the body."""
    return await _query(call, query)


@operation("GET", "/v1/agl/workers/{worker_id}", Nothing(), returns=Worker | None, errors=(503,), tag="workers")
async def get_worker(call: Call, _nothing: None) -> Worker | None:
    """Get a worker, or null if it was never heard of."""
    worker_id = call.known_id("worker_id")
    return None if worker_id is None else await call.store.get_worker_by_id(worker_id)


async def _beat_worker_row(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    beat = None if body is None else documents.read_worker_beat(call.path["worker_id"], body)
    if beat is None:
        return None
    return Reply(200, row_json.WORKERS.one(await rows.beat_worker_row(beat), exact=call.exact), JSON_HEADERS)


@operation(
    "POST",
    "/v1/agl/workers/{worker_id}",
    JsonBody[WorkerUpdate](WorkerUpdate, default=WorkerUpdate),
    returns=Worker,
    errors=(400, 503),
    tag="workers",
    lean=_beat_worker_row,
)
async def update_worker(call: Call, request: WorkerUpdate) -> Worker:
    """Record a worker's heartbeat; a new worker is created."""
    return await call.store.update_worker(call.new_id("worker_id"), **changes_of(request, _NOT_NULL))


OPERATIONS: Final[tuple[Operation, ...]] = (query_workers, search_workers, get_worker, update_worker)
