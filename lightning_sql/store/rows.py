"""Between records and the rows of the native store (`lightning_sql.database.native`)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel

from lightning_sql.database.dialects.hot import RolloutDraft, Row, SpanDraft
from lightning_sql.database.payload import decode_json, decode_text, encode_json, encode_part, encode_text
from lightning_sql.identifiers import new_rollout_id
from lightning_sql.records import (
    Attempt,
    AttemptedRollout,
    Attributes,
    EnqueueRolloutRequest,
    Event,
    Link,
    OtelResource,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    Span,
    SpanContext,
    TraceStatus,
    Worker,
    is_plain_identifier,
)

__all__ = [
    "attempt_of",
    "attempted_of",
    "conditions_text",
    "made",
    "plain_request",
    "queued_row",
    "resources_of",
    "retry_conditions",
    "rollout_draft",
    "rollout_of",
    "span_draft",
    "span_of",
    "span_size",
    "stored_payload",
    "stored_text",
    "worker_of",
]


M = TypeVar("M", bound=BaseModel)


@lru_cache(maxsize=512)
def retry_conditions(text: str) -> tuple[str, ...]:
    """The attempt statuses after which a rollout is queued again, from its column."""
    return tuple(json.loads(text))


@lru_cache(maxsize=512)
def conditions_text(conditions: tuple[str, ...]) -> str:
    """The column that `retry_conditions` reads."""
    return json.dumps(conditions, separators=(",", ":"))


def stored_payload(value: Any) -> str | None:
    """A payload as its column holds it.

    Raises:
        UnstorableValueError: it is nested too deep, or is no JSON value and cannot be made one.
    """
    return None if value is None else encode_json(value)


def stored_text(value: str | None) -> str | None:
    """A text as its column holds it."""
    return None if value is None else encode_text(value)


_NO_LIMITS: Final = RolloutConfig()


_MODES: Final = (None, *get_args(RolloutMode))


def plain_request(
    input: Any,  # noqa: A002 - the field's name
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, Any] | None,
) -> EnqueueRolloutRequest:
    """A checked request, for which nothing is asked of pydantic if nothing is out of the ordinary."""
    fields = {"input": input, "mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
    if (
        mode in _MODES
        and (resources_id is None or is_plain_identifier(resources_id))
        and (config is None or type(config) is RolloutConfig)
        and metadata is None
    ):
        return made(EnqueueRolloutRequest, fields)  # nothing is left to be checked
    return EnqueueRolloutRequest.model_validate(fields)


def rollout_draft(request: EnqueueRolloutRequest) -> RolloutDraft:
    """A request as the row that it becomes, under a fresh id.

    Raises:
        UnstorableValueError: a payload cannot be stored.
    """
    config = request.config or _NO_LIMITS
    return RolloutDraft(
        new_rollout_id(),
        stored_payload(request.input),
        request.mode,
        stored_text(request.resources_id),
        config.timeout_seconds,
        config.unresponsive_seconds,
        config.max_attempts,
        conditions_text(tuple(config.retry_condition)),
        "{}" if request.metadata is None else encode_json(request.metadata),
    )


def queued_row(draft: RolloutDraft, now: float, latest_resources_id: str | None) -> Row:
    """The row of a rollout that was queued at `now`."""
    return (
        draft.rollout_id,
        draft.input,
        now,
        None,
        draft.mode,
        latest_resources_id if draft.resources_id is None else draft.resources_id,
        "queuing",
        draft.timeout_seconds,
        draft.unresponsive_seconds,
        draft.max_attempts,
        draft.retry_condition,
        draft.metadata,
    )


# Pydantic forbids to set what is not a field; the slots themselves are asked, which is also twice as fast.
_new: Final = object.__new__
_set_values: Final = BaseModel.__dict__["__dict__"].__set__
_set_names: Final = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra: Final = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private: Final = BaseModel.__dict__["__pydantic_private__"].__set__


def made(record_type: type[M], fields: dict[str, Any], extra: dict[str, Any] | None = None) -> M:
    """A record of values that are known to be right, all of them given: a much faster `model_construct`.

    `extra` is an object, perhaps empty, for models that keep unknown keys, and else None.
    """
    record = _new(record_type)
    _set_values(record, fields)
    _set_names(record, {*fields, *extra} if extra else set(fields))
    _set_extra(record, extra)
    _set_private(record, None)
    return record


def _rollout_fields(row: Row) -> dict[str, Any]:
    return {
        "rollout_id": decode_text(row[0]),
        "input": None if row[1] is None else decode_json(row[1]),
        "start_time": row[2],
        "end_time": row[3],
        "mode": row[4],
        "resources_id": None if row[5] is None else decode_text(row[5]),
        "status": row[6],
        "config": made(
            RolloutConfig,
            {
                "timeout_seconds": row[7],
                "unresponsive_seconds": row[8],
                "max_attempts": row[9],
                "retry_condition": list(retry_conditions(row[10])),
            },
        ),
        "metadata": None if row[11] is None else decode_json(row[11]),
    }


def rollout_of(row: Row) -> Rollout:
    """A rollout from its row."""
    return made(Rollout, _rollout_fields(row))


def attempt_of(row: Row) -> Attempt:
    """An attempt from its row."""
    return made(
        Attempt,
        {
            "rollout_id": decode_text(row[0]),
            "attempt_id": decode_text(row[1]),
            "sequence_id": row[2],
            "start_time": row[3],
            "end_time": row[4],
            "status": row[5],
            "worker_id": None if row[6] is None else decode_text(row[6]),
            "last_heartbeat_time": row[7],
            "metadata": None if row[8] is None else decode_json(row[8]),
        },
    )


def attempted_of(row: Row, attempt: Attempt) -> AttemptedRollout:
    """A rollout from its row, with an attempt of it."""
    return made(AttemptedRollout, {**_rollout_fields(row), "attempt": attempt})


def worker_of(row: Row) -> Worker:
    """A worker from its row."""
    return made(
        Worker,
        {
            "worker_id": decode_text(row[0]),
            "status": row[1],
            "heartbeat_stats": None if row[2] is None else decode_json(row[2]),
            "last_heartbeat_time": row[3],
            "last_dequeue_time": row[4],
            "last_busy_time": row[5],
            "last_idle_time": row[6],
            "current_rollout_id": None if row[7] is None else decode_text(row[7]),
            "current_attempt_id": None if row[8] is None else decode_text(row[8]),
        },
    )


def _status_text(status: TraceStatus) -> str:
    if status.description is None and not status.model_extra:
        return f'{{"status_code":"{status.status_code}","description":null}}'
    return encode_part(status)


def span_draft(span: Span) -> SpanDraft:
    """A span as its row.

    Raises:
        UnstorableValueError: a payload cannot be stored.
    """
    return SpanDraft(
        encode_text(span.rollout_id),
        encode_text(span.attempt_id),
        span.sequence_id,
        encode_text(span.trace_id),
        encode_text(span.span_id),
        stored_text(span.parent_id),
        encode_text(span.name),
        _status_text(span.status),
        encode_part(span.attributes),
        encode_part(span.events) if span.events else "[]",
        encode_part(span.links) if span.links else "[]",
        span.start_time,
        span.end_time,
        None if span.context is None else encode_part(span.context),
        None if span.parent is None else encode_part(span.parent),
        encode_part(span.resource),
        encode_json(span.model_extra, inside=1) if span.model_extra else None,
    )


def resource_text(resource: OtelResource) -> str:
    """What produced a span, as its row has it."""
    return encode_part(resource)


def plain_span_draft(
    rollout_id: str,
    attempt_id: str,
    sequence_id: int,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    name: str,
    status: TraceStatus,
    attributes: Attributes,
    times: tuple[float | None, float | None],
    resource: str,
) -> SpanDraft:
    """As `span_draft`, of a span that has no events, no links and only the context of its own ids.

    Its ids are identifiers, those of OpenTelemetry in hexadecimal digits; its resource is that of a draft.
    """
    return SpanDraft(
        encode_text(rollout_id),
        encode_text(attempt_id),
        sequence_id,
        trace_id,
        span_id,
        parent_id,
        encode_text(name),
        _status_text(status),
        encode_part(attributes) if attributes else "{}",
        "[]",
        "[]",
        *times,
        f'{{"trace_id":"{trace_id}","span_id":"{span_id}","is_remote":false,"trace_state":{{}}}}',
        None,
        resource,
        None,
    )


def span_size(span: SpanDraft) -> int:
    """About how many bytes a span has."""
    size = len(span.name) + len(span.attributes) + len(span.events) + len(span.links) + len(span.resource)
    return size if span.extra is None else size + len(span.extra)


def span_of(row: Row) -> Span:
    """A span from its row."""
    extra: dict[str, Any] = {} if row[16] is None else decode_json(row[16])
    return made(
        Span,
        {
            "rollout_id": decode_text(row[0]),
            "attempt_id": decode_text(row[1]),
            "sequence_id": row[2],
            "trace_id": decode_text(row[3]),
            "span_id": decode_text(row[4]),
            "parent_id": None if row[5] is None else decode_text(row[5]),
            "name": decode_text(row[6]),
            "status": TraceStatus.model_validate(decode_json(row[7])),
            "attributes": decode_json(row[8]),
            "events": [Event.model_validate(event) for event in decode_json(row[9])],
            "links": [Link.model_validate(link) for link in decode_json(row[10])],
            "start_time": row[11],
            "end_time": row[12],
            "context": None if row[13] is None else SpanContext.model_validate(decode_json(row[13])),
            "parent": None if row[14] is None else SpanContext.model_validate(decode_json(row[14])),
            "resource": OtelResource.model_validate(decode_json(row[15])),
        },
        extra,
    )


def resources_of(row: Row) -> ResourcesUpdate:
    """A set of resources from its row."""
    return ResourcesUpdate.model_validate(
        {
            "resources_id": decode_text(row[0]),
            "create_time": row[1],
            "update_time": row[2],
            "version": row[3],
            "resources": decode_json(row[4]),
        }
    )
