"""Attempts of a rollout."""

from __future__ import annotations

from typing import Final

from lightning_api.calls import Call
from lightning_api.models import AttemptQuery, AttemptUpdate, StartAttemptRequest, changes_of
from lightning_api.operations import JsonBody, Nothing, Operation, QueryString, operation
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_sql.records import Attempt, AttemptedRollout, PaginatedResult
from lightning_sql.store import documents, row_json
from lightning_sql.store.row_store import RowStore

__all__ = ["OPERATIONS"]

_NOT_NULL: Final = frozenset(AttemptUpdate.model_fields)

_NO_ROLLOUT: Final = "-"
"""Stands for an id that no rollout can have, so that the page is checked and then empty."""


async def _query(call: Call, query: AttemptQuery) -> PaginatedResult[Attempt]:
    rollout_id = call.known_id("rollout_id")
    page = await call.store.query_attempts(_NO_ROLLOUT if rollout_id is None else rollout_id, **query.ordering())
    return query.as_requested(page)


@operation(
    "GET",
    "/v1/agl/rollouts/{rollout_id}/attempts",
    QueryString(AttemptQuery),
    returns=PaginatedResult[Attempt],
    errors=(400, 503),
    tag="attempts",
)
async def query_attempts(call: Call, query: AttemptQuery) -> PaginatedResult[Attempt]:
    """List the attempts of a rollout."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/rollouts/{rollout_id}/attempts/search",
    JsonBody[AttemptQuery](AttemptQuery),
    returns=PaginatedResult[Attempt],
    errors=(400, 503),
    tag="attempts",
)
async def search_attempts(call: Call, query: AttemptQuery) -> PaginatedResult[Attempt]:
    """List the attempts of a rollout, with the order and the page in the body."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/rollouts/{rollout_id}/attempts",
    JsonBody[StartAttemptRequest](StartAttemptRequest, default=StartAttemptRequest),
    returns=AttemptedRollout,
    status=201,
    errors=(404, 503),
    tag="attempts",
    keyed=True,
)
async def start_attempt(call: Call, request: StartAttemptRequest) -> AttemptedRollout:
    """Begin another attempt of a rollout, whatever its status."""
    key = await call.idempotency_key()
    return await call.store.start_attempt(call.existing_id("rollout_id"), request.worker_id, idempotency_key=key)


@operation(
    "GET",
    "/v1/agl/rollouts/{rollout_id}/attempts/latest",
    Nothing(),
    returns=Attempt | None,
    errors=(503,),
    tag="attempts",
)
async def get_latest_attempt(call: Call, _nothing: None) -> Attempt | None:
    """Get the attempt with the highest number, or null."""
    rollout_id = call.known_id("rollout_id")
    return None if rollout_id is None else await call.store.get_latest_attempt(rollout_id)


async def _update_attempt_row(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    if not body:
        return None
    change = documents.read_attempt_change(call.path["rollout_id"], call.path["attempt_id"], body)
    if change is None:
        return None
    return Reply(200, row_json.ATTEMPTS.one(await rows.update_attempt_row(change), exact=call.exact), JSON_HEADERS)


@operation(
    "POST",
    "/v1/agl/rollouts/{rollout_id}/attempts/{attempt_id}",
    JsonBody[AttemptUpdate](AttemptUpdate),
    returns=Attempt,
    errors=(400, 404, 503),
    tag="attempts",
    lean=_update_attempt_row,
)
async def update_attempt(call: Call, request: AttemptUpdate) -> Attempt:
    """Change fields of an attempt (`latest`: of the newest); its rollout and its worker follow."""
    changes = changes_of(request, _NOT_NULL)
    return await call.store.update_attempt(call.existing_id("rollout_id"), call.existing_id("attempt_id"), **changes)


OPERATIONS: Final[tuple[Operation, ...]] = (
    query_attempts,
    search_attempts,
    start_attempt,
    get_latest_attempt,
    update_attempt,
)
