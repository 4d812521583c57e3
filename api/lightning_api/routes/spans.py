"""Spans, one at a time in JSON."""

from __future__ import annotations

from typing import Any, Final

from lightning_api.calls import Call
from lightning_api.models import NextSequenceRequest, SequenceNumber, SpanQuery
from lightning_api.operations import JsonBody, Operation, QueryString, operation
from lightning_api.pages import page_reply
from lightning_api.replies import JSON_HEADERS, Reply, Stream
from lightning_sql.records import PaginatedResult, Span
from lightning_sql.store import documents, row_json, row_store
from lightning_sql.store.row_store import RowStore

__all__ = ["OPERATIONS", "find_spans"]


async def find_spans(call: Call, query: SpanQuery, *, total: bool = True) -> PaginatedResult[Span] | Reply | Stream:
    """A page of spans; without `total`, they need not be counted."""
    wanted: dict[str, Any] = {
        "rollout_id": query.rollout_id,
        "attempt_id": query.attempt_id,
        "trace_id": query.trace_id,
        "trace_id_contains": query.trace_id_contains,
        "span_id": query.span_id,
        "span_id_contains": query.span_id_contains,
        "parent_id": query.parent_id,
        "parent_id_contains": query.parent_id_contains,
        "name": query.name,
        "name_contains": query.name_contains,
        "filter_logic": query.filter_logic,
        **query.ordering(),
    }
    rows = call.store.rows
    if rows is not None:
        page = await rows.span_page(row_store.SpanQuery(**wanted, total=total, spliced=True))
        return page_reply(call, query, page, row_json.SPLICED_SPANS)
    return query.as_requested(await call.store.query_spans(**wanted))


@operation(
    "GET",
    "/v1/agl/spans",
    QueryString(SpanQuery),
    returns=PaginatedResult[Span],
    errors=(400, 503),
    tag="spans",
)
async def query_spans(call: Call, query: SpanQuery) -> PaginatedResult[Span] | Reply | Stream:
    """List the spans of a rollout, or of one of its attempts."""
    return await find_spans(call, query)


@operation(
    "POST",
    "/v1/agl/spans/search",
    JsonBody[SpanQuery](SpanQuery),
    returns=PaginatedResult[Span],
    errors=(400, 503),
    tag="spans",
    hot=True,
)
async def search_spans(call: Call, query: SpanQuery) -> PaginatedResult[Span] | Reply | Stream:
    """List spans, with the filters in the body."""
    return await find_spans(call, query)


async def _add_span_row(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    draft = documents.read_span(body) if body else None
    if draft is None:
        return None
    [outcome] = await rows.add_span_rows([draft], strict=True)
    if outcome is documents.SpanOutcome.DUPLICATE:
        return Reply(201, b"null", JSON_HEADERS)
    return Reply(201, row_json.SPANS.one(draft, exact=call.exact), JSON_HEADERS)


@operation(
    "POST",
    "/v1/agl/spans",
    JsonBody[Span](Span),
    returns=Span | None,
    status=201,
    errors=(404, 503),
    tag="spans",
    lean=_add_span_row,
)
async def add_span(call: Call, span: Span) -> Span | None:
    """Store a span, which is a heartbeat of its attempt; null when it is stored already."""
    return await call.store.add_span(span)


async def _next_number(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    rollout_id = documents.read_number_request(body) if body else None
    if rollout_id is None:
        return None
    return Reply(200, b'{"sequence_id":%d}' % await rows.next_number(rollout_id), JSON_HEADERS)


@operation(
    "POST",
    "/v1/agl/spans/next",
    JsonBody[NextSequenceRequest](NextSequenceRequest),
    returns=SequenceNumber,
    errors=(503,),
    tag="spans",
    lean=_next_number,
)
async def next_span_sequence_id(call: Call, request: NextSequenceRequest) -> dict[str, int]:
    """Issue the next sequence number of a rollout's spans."""
    return {"sequence_id": await call.store.get_next_span_sequence_id(request.rollout_id, request.attempt_id)}


OPERATIONS: Final[tuple[Operation, ...]] = (query_spans, search_spans, add_span, next_span_sequence_id)
