"""Versioned resources."""

from __future__ import annotations

from typing import Final

from lightning_api.calls import Call
from lightning_api.models import ResourcesQuery
from lightning_api.operations import JsonBody, Nothing, Operation, QueryString, operation
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_sql.records import NamedResources, PaginatedResult, ResourcesUpdate
from lightning_sql.store import row_json
from lightning_sql.store.row_store import Row, RowStore

__all__ = ["OPERATIONS"]


@operation(
    "GET",
    "/v1/agl/resources",
    QueryString(ResourcesQuery),
    returns=PaginatedResult[ResourcesUpdate],
    errors=(400, 503),
    tag="resources",
)
async def query_resources(call: Call, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
    """List resources."""
    page = await call.store.query_resources(
        resources_id=query.resources_id,
        resources_id_contains=query.resources_id_contains,
        **query.ordering(),
    )
    return query.as_requested(page)


@operation(
    "POST",
    "/v1/agl/resources",
    JsonBody[NamedResources](NamedResources),
    returns=ResourcesUpdate,
    status=201,
    errors=(503,),
    tag="resources",
    keyed=True,
)
async def add_resources(call: Call, resources: NamedResources) -> ResourcesUpdate:
    """Store resources under a new id; they become the latest."""
    return await call.store.add_resources(resources, idempotency_key=await call.idempotency_key())


def _reply(call: Call, row: Row | None) -> Reply:
    body = b"null" if row is None else row_json.RESOURCES.one(row, exact=call.exact)
    return Reply(200, body, JSON_HEADERS)


async def _latest_row(call: Call, rows: RowStore) -> Reply | None:
    return _reply(call, await rows.latest_resources_row())


async def _row(call: Call, rows: RowStore) -> Reply | None:
    resources_id = call.known_id("resources_id")
    return _reply(call, None if resources_id is None else await rows.resources_row(resources_id))


@operation(
    "GET",
    "/v1/agl/resources/latest",
    Nothing(),
    returns=ResourcesUpdate | None,
    errors=(503,),
    tag="resources",
    lean=_latest_row,
)
async def get_latest_resources(call: Call, _nothing: None) -> ResourcesUpdate | None:
    """Get the resources that were written last, or null."""
    return await call.store.get_latest_resources()


@operation(
    "GET",
    "/v1/agl/resources/{resources_id}",
    Nothing(),
    returns=ResourcesUpdate | None,
    errors=(503,),
    tag="resources",
    lean=_row,
)
async def get_resources(call: Call, _nothing: None) -> ResourcesUpdate | None:
    """Get the resources of an id, or null."""
    resources_id = call.known_id("resources_id")
    return None if resources_id is None else await call.store.get_resources_by_id(resources_id)


@operation(
    "POST",
    "/v1/agl/resources/{resources_id}",
    JsonBody[NamedResources](NamedResources),
    returns=ResourcesUpdate,
    errors=(503,),
    tag="resources",
    keyed=True,
)
async def update_resources(call: Call, resources: NamedResources) -> ResourcesUpdate:
    """Replace the resources of an id and count its version up, or create it; they become the latest."""
    key = await call.idempotency_key()
    return await call.store.update_resources(call.new_id("resources_id"), resources, idempotency_key=key)


OPERATIONS: Final[tuple[Operation, ...]] = (
    query_resources,
    add_resources,
    get_latest_resources,
    get_resources,
    update_resources,
)
