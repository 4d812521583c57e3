"""Spans of the OpenTelemetry SDK, seen without importing it.

The conversion is CONTRACT.md section 6's: nanoseconds become seconds, ids become hexadecimal text,
whatever an attribute cannot hold becomes JSON text or is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from lightning_sql.records import Attributes, AttributeValue, Event, Link, OtelResource, Span, SpanContext, TraceStatus

__all__ = ["ReadableSpan", "attribute_value", "attributes", "seconds", "span_from_sdk"]


class ReadableSpan(Protocol):
    """What is read of an `opentelemetry.sdk.trace.ReadableSpan`."""

    name: Any
    context: Any
    parent: Any
    status: Any
    attributes: Any
    events: Any
    links: Any
    start_time: Any
    end_time: Any
    resource: Any


def attribute_value(value: Any) -> AttributeValue | None:
    """A value as an attribute may hold it; None when there is nothing to hold.

    Bytes become lowercase hexadecimal text. Mappings and sequences of mixed kinds become JSON text,
    so that one odd value costs nothing but its shape (CONTRACT.md section 12, entry 23).
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Sequence):
        items = [attribute_value(item) for item in cast(Sequence[Any], value)]
        kinds = {type(item) for item in items}
        if len(kinds) <= 1 and kinds <= {str, bool, int, float}:
            return cast(AttributeValue, items)
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def attributes(values: Mapping[str, Any] | None) -> Attributes:
    """Attributes as a record holds them; those without a value are left out."""
    converted = {key: attribute_value(value) for key, value in (values or {}).items()}
    return {key: value for key, value in converted.items() if value is not None}


def seconds(nanoseconds: int | None) -> float | None:
    """A time in seconds since the epoch; OpenTelemetry's 0 is no time."""
    # Dividing integers rounds once; a float would round the dividend, too.
    return nanoseconds / 10**9 if nanoseconds else None


def _context(context: Any) -> SpanContext:
    return SpanContext(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        is_remote=bool(context.is_remote),
        trace_state={str(key): str(value) for key, value in dict(context.trace_state or {}).items()},
    )


def span_from_sdk(readable: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
    """The record of a span that the OpenTelemetry SDK ended."""
    context = _context(readable.context)
    parent = None if readable.parent is None else _context(readable.parent)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=None if parent is None else parent.span_id,
        name=readable.name,
        status=TraceStatus(status_code=readable.status.status_code.name, description=readable.status.description),
        attributes=attributes(readable.attributes),
        events=[
            Event(name=event.name, attributes=attributes(event.attributes), timestamp=seconds(event.timestamp))
            for event in readable.events
        ],
        links=[
            Link(context=_context(link.context), attributes=attributes(link.attributes) or None)
            for link in readable.links
        ],
        start_time=seconds(readable.start_time),
        end_time=seconds(readable.end_time),
        context=context,
        parent=parent,
        resource=OtelResource(
            attributes=attributes(readable.resource.attributes), schema_url=readable.resource.schema_url
        ),
    )
