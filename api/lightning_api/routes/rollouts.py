"""Rollouts."""

from __future__ import annotations

from typing import Any, Final

from lightning_api.models import RolloutQuery, RolloutUpdate, StartRolloutRequest, changes_of
from lightning_api.operations import Call, JsonBody, Nothing, Operation, QueryString, operation
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import AttemptedRollout, PaginatedResult, Rollout

__all__ = ["OPERATIONS", "without_attempt"]

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
)
async def start_rollout(call: Call, request: StartRolloutRequest) -> AttemptedRollout:
    """Create a rollout that is worked on at once, with its first attempt."""
    return await call.store.start_rollout(
        request.input, request.mode, request.resources_id, request.config, request.metadata, request.worker_id
    )


async def _query(call: Call, query: RolloutQuery) -> PaginatedResult[Rollout]:
    page = await call.store.query_rollouts(
        status_in=query.status_in,
        rollout_id_in=query.rollout_id_in,
        rollout_id_contains=query.rollout_id_contains,
        filter_logic=query.filter_logic,
        **query.ordering(),
    )
    return query.as_requested(page)


@operation(
    "GET",
    "/v1/agl/rollouts",
    QueryString(RolloutQuery),
    returns=PaginatedResult[AttemptedRollout | Rollout],
    errors=(400, 503),
    tag="rollouts",
)
async def query_rollouts(call: Call, query: RolloutQuery) -> PaginatedResult[Rollout]:
    """List rollouts, those that were attempted with their latest attempt."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/rollouts/search",
    JsonBody[RolloutQuery](RolloutQuery),
    returns=PaginatedResult[AttemptedRollout | Rollout],
    errors=(400, 503),
    tag="rollouts",
)
async def search_rollouts(call: Call, query: RolloutQuery) -> PaginatedResult[Rollout]:
    """List rollouts, with the filters in the body."""
    return await _query(call, query)


@operation(
    "GET",
    "/v1/agl/rollouts/{rollout_id}",
    Nothing(),
    returns=AttemptedRollout | Rollout,
    errors=(404, 503),
    tag="rollouts",
)
async def get_rollout(call: Call, _nothing: None) -> Rollout:
    """Get a rollout, with its latest attempt if there is one."""
    rollout_id = call.existing_id("rollout_id")
    rollout = await call.store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise RecordNotFoundError(f"there is no rollout {rollout_id!r}")
    return rollout


@operation(
    "POST",
    "/v1/agl/rollouts/{rollout_id}",
    JsonBody[RolloutUpdate](RolloutUpdate),
    returns=Rollout,
    errors=(400, 404, 503),
    tag="rollouts",
)
async def update_rollout(call: Call, request: RolloutUpdate) -> Any:
    """Change fields of a rollout; its attempts stay as they are."""
    changes = changes_of(request, _NOT_NULL)
    return without_attempt(await call.store.update_rollout(call.existing_id("rollout_id"), **changes))


OPERATIONS: Final[tuple[Operation, ...]] = (
    start_rollout,
    query_rollouts,
    search_rollouts,
    get_rollout,
    update_rollout,
)
