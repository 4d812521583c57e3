"""Spans, one at a time in JSON."""

from __future__ import annotations

from typing import Final

from lightning_api.models import NextSequenceRequest, SequenceNumber, SpanQuery
from lightning_api.operations import Call, JsonBody, Operation, QueryString, operation
from lightning_sql.records import PaginatedResult, Span

__all__ = ["OPERATIONS"]


async def _query(call: Call, query: SpanQuery) -> PaginatedResult[Span]:
    page = await call.store.query_spans(
        query.rollout_id,
        query.attempt_id,
        trace_id=query.trace_id,
        trace_id_contains=query.trace_id_contains,
        span_id=query.span_id,
        span_id_contains=query.span_id_contains,
        parent_id=query.parent_id,
        parent_id_contains=query.parent_id_contains,
        name=query.name,
        name_contains=query.name_contains,
        filter_logic=query.filter_logic,
        **query.ordering(),
    )
    return query.as_requested(page)


@operation(
    "GET",
    "/v1/agl/spans",
    QueryString(SpanQuery),
    returns=PaginatedResult[Span],
    errors=(400, 503),
    tag="spans",
)
async def query_spans(call: Call, query: SpanQuery) -> PaginatedResult[Span]:
    """List the spans of a rollout, or of one of its attempts."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/spans/search",
    JsonBody[SpanQuery](SpanQuery),
    returns=PaginatedResult[Span],
    errors=(400, 503),
    tag="spans",
)
async def search_spans(call: Call, query: SpanQuery) -> PaginatedResult[Span]:
    """List spans, with the filters in the body."""
    return await _query(call, query)


@operation(
    "POST",
    "/v1/agl/spans",
    JsonBody[Span](Span),
    returns=Span | None,
    status=201,
    errors=(404, 503),
    tag="spans",
)
async def add_span(call: Call, span: Span) -> Span | None:
    """Store a span, which is a heartbeat of its attempt; null when it is stored already."""
    return await call.store.add_span(span)


@operation(
    "POST",
    "/v1/agl/spans/next",
    JsonBody[NextSequenceRequest](NextSequenceRequest),
    returns=SequenceNumber,
    errors=(503,),
    tag="spans",
)
async def next_span_sequence_id(call: Call, request: NextSequenceRequest) -> dict[str, int]:
    """Issue the next sequence number of a rollout's spans."""
    return {"sequence_id": await call.store.get_next_span_sequence_id(request.rollout_id, request.attempt_id)}


OPERATIONS: Final[tuple[Operation, ...]] = (query_spans, search_spans, add_span, next_span_sequence_id)
