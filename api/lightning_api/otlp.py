"""OTLP/HTTP in protobuf: from an export request to spans (CONTRACT.md section 6).

What belongs to no attempt is skipped; what cannot be stored costs only itself and is counted.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from pydantic import ValidationError

from lightning_api.errors import BodyTooLargeError
from lightning_api.otlp_limits import MalformedExportError, check_fields, decompress
from lightning_sql.otel import attribute_value, seconds
from lightning_sql.records import (
    SEQUENCE_LIMIT,
    Attributes,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    StatusCode,
    TraceStatus,
    is_plain_identifier,
)
from lightning_sql.store import documents
from lightning_sql.store.documents import SpanDraft

__all__ = [
    "ATTEMPT_ID",
    "CONTENT_TYPE",
    "RECORDS",
    "ROLLOUT_ID",
    "SEQUENCE_ID",
    "Export",
    "MalformedExportError",
    "compress",
    "decode_export",
    "decode_export_rows",
    "decompress",
    "encode_response",
    "encode_status",
    "gzip_wanted",
]

CONTENT_TYPE: Final = "application/x-protobuf"

ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SEQUENCE_ID: Final = "agentlightning.span_sequence_id"

_STATUS_CODES: Final[Mapping[int, StatusCode]] = {0: "UNSET", 1: "OK", 2: "ERROR"}
_NAMED_REASONS: Final = 5

RECORDS: Final = 50_000
"""The most spans, events and links, all together, that an export may have: each becomes a record."""


S = TypeVar("S")


class _Resource(NamedTuple):
    """What produced some spans."""

    record: OtelResource
    text: str | None = None
    """As a row has it, where rows are made."""


_Make: TypeAlias = Callable[[ProtoSpan, Attributes, _Resource, str, str, int], S]
"""Makes something of a span, its attributes, its resource, the ids of its rollout and attempt, and its number."""


@dataclass(slots=True)
class Export(Generic[S]):
    """The spans of one request that name their attempt: as records, or as drafts of their rows."""

    spans: list[S] = field(default_factory=list[S])
    unnumbered: set[int] = field(default_factory=set[int])
    """The indexes of those without a usable sequence number."""
    unroutable: int = 0
    """How many named no rollout or no attempt."""
    rejected: list[str] = field(default_factory=list[str])
    """Why a span could not become a record, one reason each."""


def decode_export(body: bytes) -> Export[Span]:
    """The spans of a binary `ExportTraceServiceRequest`; an empty body is an empty export.

    Raises:
        MalformedExportError: it is no such message.
        BodyTooLargeError: it has too many fields, or too many spans, events and links.
    """
    return _decoded(body, _record, _Resource)


def decode_export_rows(body: bytes) -> Export[SpanDraft]:
    """As `decode_export`, for a store that has rows: what becomes of the records, mostly without making any."""
    return _decoded(body, _draft, lambda record: _Resource(record, documents.resource_text(record)))


def _decoded(body: bytes, make: _Make[S], resource_of: Callable[[OtelResource], _Resource]) -> Export[S]:
    """The spans of an export, each as it is made.

    Raises:
        MalformedExportError: it is no such message.
        BodyTooLargeError: it has too many fields, or too many spans, events and links.
    """
    check_fields(body)
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except message.DecodeError:
        raise MalformedExportError("the body is not an ExportTraceServiceRequest") from None
    _check_records(request)
    export = Export[S]()
    for resource_spans in request.resource_spans:
        resource = resource_of(
            OtelResource.model_construct(
                attributes=_attributes(resource_spans.resource.attributes), schema_url=resource_spans.schema_url
            )
        )
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                _add_span(export, make, span, resource)
    return export


def _check_records(request: ExportTraceServiceRequest) -> None:
    count = 0
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            count += len(scope_spans.spans)
            if count > RECORDS:
                raise BodyTooLargeError
            count += sum(len(span.events) + len(span.links) for span in scope_spans.spans)
    if count > RECORDS:
        raise BodyTooLargeError


def _add_span(export: Export[S], make: _Make[S], span: ProtoSpan, resource: _Resource) -> None:
    own = _attributes(span.attributes)
    rollout_id, attempt_id, number = (
        own.get(key, resource.record.attributes.get(key)) for key in (ROLLOUT_ID, ATTEMPT_ID, SEQUENCE_ID)
    )
    if rollout_id is None or attempt_id is None:
        export.unroutable += 1
        return
    sequence_id = _sequence_id(number)
    try:
        made = make(span, own, resource, str(rollout_id), str(attempt_id), sequence_id or 0)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        export.rejected.append(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return
    if sequence_id is None:
        export.unnumbered.add(len(export.spans))
    export.spans.append(made)


def _sequence_id(value: Any) -> int | None:
    """The sequence number that an attribute gives, or None if the store must issue one."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if 0 <= number < SEQUENCE_LIMIT else None


def _record(
    span: ProtoSpan, own: Attributes, resource: _Resource, rollout_id: str, attempt_id: str, sequence_id: int
) -> Span:
    trace_id, span_id = span.trace_id.hex().zfill(32), span.span_id.hex().zfill(16)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=span.parent_span_id.hex().zfill(16) if span.parent_span_id else None,
        name=span.name,
        status=TraceStatus(
            status_code=_STATUS_CODES.get(span.status.code, "UNSET"), description=span.status.message or None
        ),
        attributes=own,
        events=[
            Event(
                name=event.name,
                attributes=_attributes(event.attributes),
                timestamp=seconds(event.time_unix_nano),
            )
            for event in span.events
        ],
        links=[
            Link(
                context=_context(link.trace_id.hex().zfill(32), link.span_id.hex().zfill(16)),
                attributes=_attributes(link.attributes) or None,
            )
            for link in span.links
        ],
        start_time=seconds(span.start_time_unix_nano),
        end_time=seconds(span.end_time_unix_nano),
        context=_context(trace_id, span_id),
        parent=None,
        resource=resource.record,
    )


_PLAIN_STATUSES: Final = {number: TraceStatus(status_code=code) for number, code in _STATUS_CODES.items()}
_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8


def _draft(
    span: ProtoSpan, own: Attributes, resource: _Resource, rollout_id: str, attempt_id: str, sequence_id: int
) -> SpanDraft:
    trace_id, span_id, parent_id = span.trace_id, span.span_id, span.parent_span_id
    status = None if span.status.message else _PLAIN_STATUSES.get(span.status.code)
    if (
        span.events
        or span.links
        or resource.text is None
        or status is None
        or len(trace_id) > _TRACE_ID_BYTES
        or len(span_id) > _SPAN_ID_BYTES
        or len(parent_id) > _SPAN_ID_BYTES
        or not (is_plain_identifier(rollout_id) and is_plain_identifier(attempt_id))
    ):
        return documents.span_draft(_record(span, own, resource, rollout_id, attempt_id, sequence_id))
    return documents.plain_span_draft(
        rollout_id,
        attempt_id,
        sequence_id,
        trace_id.hex().zfill(2 * _TRACE_ID_BYTES),
        span_id.hex().zfill(2 * _SPAN_ID_BYTES),
        parent_id.hex().zfill(2 * _SPAN_ID_BYTES) if parent_id else None,
        span.name,
        status,
        own,
        (seconds(span.start_time_unix_nano), seconds(span.end_time_unix_nano)),
        resource.text,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    found: Attributes = {}
    for pair in pairs:
        value = pair.value
        if value.WhichOneof("value") == "string_value":  # as most are
            found[pair.key] = value.string_value
            continue
        converted = attribute_value(_value(value))
        if converted is None:
            found.pop(pair.key, None)
        else:
            found[pair.key] = converted
    return found


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _value(pair.value) for pair in value.kvlist_value.values}
        case _:
            return None


def encode_response(rejected: int, reasons: Sequence[str]) -> bytes:
    """An `ExportTraceServiceResponse`, with a partial success if spans were rejected."""
    response = ExportTraceServiceResponse()
    if rejected:
        named = list(dict.fromkeys(reasons))
        text = "; ".join(named[:_NAMED_REASONS]) + ("; …" if len(named) > _NAMED_REASONS else "")
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = f"{rejected} spans were rejected: {text}"
    return response.SerializeToString()


def _status_class() -> type[Any]:
    """`google.rpc.Status`, without a dependency for two fields; its details are never used here."""
    file = descriptor_pb2.FileDescriptorProto(name="google/rpc/status.proto", package="google.rpc", syntax="proto3")
    status = file.message_type.add(name="Status")
    kinds = descriptor_pb2.FieldDescriptorProto
    status.field.add(name="code", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    status.field.add(name="message", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("google.rpc.Status"))


_Status: Final = _status_class()
_RPC_CODES: Final[Mapping[int, int]] = {400: 3, 404: 5, 413: 8, 422: 3, 500: 13, 503: 14}


def encode_status(http_status: int, reason: str) -> bytes:
    """A binary `google.rpc.Status`, as OTLP wants it in answer to a failed export."""
    return _Status(code=_RPC_CODES.get(http_status, 2), message=reason).SerializeToString()


def gzip_wanted(accept_encoding: bytes) -> bool:
    """Whether an `Accept-Encoding` header lists gzip."""
    for entry in accept_encoding.lower().split(b","):
        coding, *parameters = (part.strip() for part in entry.split(b";"))
        if coding in (b"gzip", b"x-gzip"):
            weights = [parameter[2:].strip() for parameter in parameters if parameter.startswith(b"q=")]
            return not weights or weights[0].strip(b"0.") != b""
    return False


def compress(body: bytes) -> bytes:
    """A gzip file, the same for the same content."""
    return gzip.compress(body, compresslevel=5, mtime=0)
