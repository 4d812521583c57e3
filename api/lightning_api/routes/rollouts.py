"""Rollouts."""

from __future__ import annotations

from typing import Any, Final

from lightning_api.calls import Call
from lightning_api.models import RolloutQuery, RolloutUpdate, StartRolloutRequest, changes_of
from lightning_api.operations import JsonBody, Nothing, Operation, QueryString, operation
from lightning_api.pages import page_reply
from lightning_api.replies import JSON_HEADERS, Reply, Stream
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import AttemptedRollout, PaginatedResult, Rollout
from lightning_sql.store import row_json, row_store

__all__ = ["OPERATIONS", "find_rollouts", "without_attempt"]

_NOT_NULL: Final = frozenset({"status", "config"})


def without_attempt(rollout: Rollout) -> Any:
    """The JSON form of a rollout where the protocol answers it alone."""
    if isinstance(rollout, AttemptedRollout):
        return {name: value for name, value in rollout.__dict__.items() if name != "attempt"}
    return rollout


@operation(
    "POST",
    "/v1/agl/rollouts",
    JsonBody[StartRolloutRequest](StartRolloutRequest),
    returns=AttemptedRollout,
    status=201,
    errors=(503,),
    tag="rollouts",
    keyed=True,
)
async def start_rollout(call: Call, request: StartRolloutRequest) -> AttemptedRollout:
    """Create a rollout that is worked on at once, with its first attempt."""
    return await call.store.start_rollout(
        request.input,
        request.mode,
        request.resources_id,
        request.config,
        request.metadata,
        request.worker_id,
        idempotency_key=await call.idempotency_key(),
    )


async def find_rollouts(
    call: Call, query: RolloutQuery, *, total: bool = True
) -> PaginatedResult[Rollout] | Reply | Stream:
    """A page of rollouts; without `total`, they need not be counted."""
    wanted: dict[str, Any] = {
        "status_in": query.status_in,
        "rollout_id_in": query.rollout_id_in,
        "rollout_id_contains": query.rollout_id_contains,
        "filter_logic": query.filter_logic,
        **query.ordering(),
    }
    rows = call.store.rows
    if rows is not None:
        page = await rows.rollout_page(row_store.RolloutQuery(**wanted, total=total))
        return page_reply(call, query, page, row_json.ATTEMPTED_ROLLOUTS)
    return query.as_requested(await call.store.query_rollouts(**wanted))


@operation(
    "GET",
    "/v1/agl/rollouts",
    QueryString(RolloutQuery),
    returns=PaginatedResult[AttemptedRollout | Rollout],
    errors=(400, 503),
    tag="rollouts",
)
async def query_rollouts(call: Call, query: RolloutQuery) -> PaginatedResult[Rollout] | Reply | Stream:
    """List rollouts, those that were attempted with their latest attempt."""
    return await find_rollouts(call, query)


@operation(
    "POST",
    "/v1/agl/rollouts/search",
    JsonBody[RolloutQuery](RolloutQuery),
    returns=PaginatedResult[AttemptedRollout | Rollout],
    errors=(400, 503),
    tag="rollouts",
    hot=True,
)
async def search_rollouts(call: Call, query: RolloutQuery) -> PaginatedResult[Rollout] | Reply | Stream:
    """List rollouts, with the filters in the body."""
    return await find_rollouts(call, query)


@operation(
    "GET",
    "/v1/agl/rollouts/{rollout_id}",
    Nothing(),
    returns=AttemptedRollout | Rollout,
    errors=(404, 503),
    tag="rollouts",
    hot=True,
)
async def get_rollout(call: Call, _nothing: None) -> Rollout | Reply:
    """Get a rollout, with its latest attempt if there is one."""
    rollout_id = call.existing_id("rollout_id")
    rows = call.store.rows
    if rows is not None:
        row = await rows.rollout_row(rollout_id)
        if row is not None:
            return Reply(200, row_json.ATTEMPTED_ROLLOUTS.one(row, exact=call.exact), JSON_HEADERS)
    else:
        rollout = await call.store.get_rollout_by_id(rollout_id)
        if rollout is not None:
            return rollout
    raise RecordNotFoundError(f"there is no rollout {rollout_id!r}")


@operation(
    "POST",
    "/v1/agl/rollouts/{rollout_id}",
    JsonBody[RolloutUpdate](RolloutUpdate),
    returns=Rollout,
    errors=(400, 404, 503),
    tag="rollouts",
    keyed=True,
)
async def update_rollout(call: Call, request: RolloutUpdate) -> Any:
    """Change fields of a rollout; its attempts stay as they are."""
    changes = changes_of(request, _NOT_NULL)
    key = await call.idempotency_key()
    rollout_id = call.existing_id("rollout_id")
    return without_attempt(await call.store.update_rollout(rollout_id, **changes, idempotency_key=key))


OPERATIONS: Final[tuple[Operation, ...]] = (
    start_rollout,
    query_rollouts,
    search_rollouts,
    get_rollout,
    update_rollout,
)
