"""JSON bodies as rows of the native store, without records in between: what a caller sent is stored as it was written.

Reading is strict: whatever a record would change (`"2"` for a number, a key left out that the record
fills in) or refuse gives None, and the caller takes the way over the records, which decides and which
names the problem. `lightning_sql.store.row_json` is the way back.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from lightning_sql.database.dialects.hot import (
    AttemptChange,
    RolloutDraft,
    SpanDraft,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.identifiers import new_rollout_id
from lightning_sql.jsonable import NESTING_LIMIT, deeper_than
from lightning_sql.records import SEQUENCE_LIMIT, AttemptStatus, RolloutMode, Span, StatusCode, unsigned_zero
from lightning_sql.store.rows import conditions_text, plain_span_draft, resource_text, span_draft, span_size

__all__ = [
    "AttemptChange",
    "RolloutDraft",
    "SpanDraft",
    "SpanOutcome",
    "WorkerBeat",
    "plain_span_draft",
    "read_attempt_change",
    "read_claim",
    "read_number_request",
    "read_rollouts",
    "read_span",
    "read_span_list",
    "read_worker_beat",
    "resource_text",
    "span_draft",
    "span_size",
    "unknown_attempt",
]


_LONGEST_IDENTIFIER: Final = 128
"""In characters: so short an identifier has no more bytes than one may have."""
_SMALLEST_NUMBER: Final = -(2**63)
_LARGEST_NUMBER: Final = 2**63 - 1

# What the stored form escapes; without it, texts and payloads are stored as they are. (Lone surrogates are
# refused by the decoder.)
_TO_ESCAPE: Final = re.compile(rb"\\u(?:0000|001[aA])")


_SPACE_BEHIND_A_NAME: Final = re.compile(r'"[ \t\r\n]+:')


class _UnsureError(Exception):
    """The records must decide."""


_UNSURE: Final = (_UnsureError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object with exactly these keys; those with a default may be left out."""


class _Config(_Strict):
    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: tuple[AttemptStatus, ...] = ()


class _NewRollout(_Strict):
    input: Raw
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: _Config | None = None
    metadata: Raw | UnsetType = UNSET


class _NewRollouts(_Strict):
    rollouts: list[_NewRollout]


class _Claim(_Strict):
    limit: int = 1
    worker_id: str | None = None
    wait: float | None = None


class _AttemptUpdate(_Strict):
    status: AttemptStatus | UnsetType = UNSET
    worker_id: str | UnsetType = UNSET
    last_heartbeat_time: float | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


class _WorkerUpdate(_Strict):
    heartbeat_stats: Raw | UnsetType = UNSET


class _NumberRequest(_Strict):
    rollout_id: str
    attempt_id: str


class _SpanParts(_Strict):
    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: Raw
    attributes: Raw
    events: Raw
    links: Raw
    start_time: float | None
    end_time: float | None
    context: Raw
    parent: Raw
    resource: Raw


class _SpanList(_Strict):
    spans: list[Raw]
    unnumbered: list[int] = []


_Attributes: TypeAlias = dict[str, str | bool | int | float | list[str | bool | int | float]]


class _Status(_Strict):
    status_code: StatusCode
    description: str | None


class _Context(_Strict):
    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: dict[str, str]


class _Event(_Strict):
    name: str
    attributes: _Attributes
    # An integer would become a float in the record, so it is told apart.
    timestamp: int | float | None


class _Link(_Strict):
    context: _Context
    attributes: _Attributes | None


class _Resource(_Strict):
    attributes: _Attributes
    schema_url: str


_rollouts: Final = msgspec.json.Decoder(_NewRollouts)
_claim: Final = msgspec.json.Decoder(_Claim)
_attempt_update: Final = msgspec.json.Decoder(_AttemptUpdate)
_worker_update: Final = msgspec.json.Decoder(_WorkerUpdate)
_number_request: Final = msgspec.json.Decoder(_NumberRequest)
_span_parts: Final = msgspec.json.Decoder(_SpanParts)
_span_list: Final = msgspec.json.Decoder(_SpanList)
_attributes: Final = msgspec.json.Decoder(_Attributes)
_status: Final = msgspec.json.Decoder(_Status)
_context: Final = msgspec.json.Decoder(_Context)
_events: Final = msgspec.json.Decoder(list[_Event])
_links: Final = msgspec.json.Decoder(list[_Link])
_resource: Final = msgspec.json.Decoder(_Resource)
_anything: Final = msgspec.json.Decoder()
_object: Final = msgspec.json.Decoder(dict[str, Any])


def read_rollouts(body: bytes) -> list[RolloutDraft] | None:
    """The rollouts of an enqueue request, under fresh ids; None if the records must decide, also on none at all."""
    try:
        _check_escapes(body)
        drafts = [_rollout_draft(rollout) for rollout in _rollouts.decode(body).rollouts]
    except _UNSURE:
        return None
    return drafts or None


class ClaimDraft(NamedTuple):
    """A dequeue request."""

    limit: int = 1
    worker_id: str | None = None
    wait: float = 0.0


def read_claim(body: bytes) -> ClaimDraft | None:
    """A dequeue request; None if the records must decide."""
    if not body:
        return ClaimDraft()
    try:
        _check_escapes(body)
        claim = _claim.decode(body)
        _check_identifiers(claim.worker_id)
    except _UNSURE:
        return None
    return ClaimDraft(claim.limit, claim.worker_id, claim.wait or 0.0)


def read_attempt_change(rollout_id: str, attempt_id: str, body: bytes) -> AttemptChange | None:
    """An attempt update (`latest` for the newest attempt); None if the records must decide."""
    try:
        _check_escapes(body)
        update = _attempt_update.decode(body)
        worker_id = None if update.worker_id is UNSET else update.worker_id
        _check_identifiers(rollout_id, attempt_id, worker_id)
        return AttemptChange(
            encode_text(rollout_id),
            None if attempt_id == "latest" else encode_text(attempt_id),
            None if update.status is UNSET else update.status,
            worker_id,
            None if update.last_heartbeat_time is UNSET else unsigned_zero(update.last_heartbeat_time),
            None if update.metadata is UNSET else _object_text(update.metadata),
        )
    except _UNSURE:
        return None


def read_worker_beat(worker_id: str, body: bytes) -> WorkerBeat | None:
    """A worker's heartbeat; None if the records must decide."""
    try:
        _check_identifiers(worker_id)
        stats: str | None = None
        if body:
            _check_escapes(body)
            update = _worker_update.decode(body)
            stats = None if update.heartbeat_stats is UNSET else _object_text(update.heartbeat_stats)
        return WorkerBeat(encode_text(worker_id), stats)
    except _UNSURE:
        return None


def read_number_request(body: bytes) -> str | None:
    """The rollout that a sequence number is asked for; None if the records must decide."""
    try:
        _check_escapes(body)
        request = _number_request.decode(body)
        _check_identifiers(request.rollout_id, request.attempt_id)
    except _UNSURE:
        return None
    return request.rollout_id


def read_span_list(body: bytes) -> tuple[list[bytes], list[int]] | None:
    """The documents of the spans in `{"spans": […]}`, not yet looked into; and which of them have no number.

    None if that is not what it is.
    """
    try:
        found = _span_list.decode(body)
    except _UNSURE:
        return None
    return [bytes(span) for span in found.spans], found.unnumbered


def read_span(document: bytes) -> SpanDraft | None:
    """A span; None if the records must decide."""
    try:
        _check_escapes(document)
        span = _span_parts.decode(document)
        _check_identifiers(span.rollout_id, span.attempt_id, span.trace_id, span.span_id, span.parent_id)
        if not _SMALLEST_NUMBER <= span.sequence_id < SEQUENCE_LIMIT:
            raise _UnsureError
        return SpanDraft(
            span.rollout_id,
            span.attempt_id,
            span.sequence_id,
            span.trace_id,
            span.span_id,
            span.parent_id,
            span.name,
            _status_text(span.status),
            _attributes_text(span.attributes),
            _events_text(span.events),
            _links_text(span.links),
            _seconds(span.start_time),
            _seconds(span.end_time),
            _context_text(span.context),
            _context_text(span.parent),
            _resource_text(span.resource),
            None,
        )
    except _UNSURE:
        return None


def unknown_attempt(span: SpanDraft | Span) -> str:
    """Why a span of an attempt that does not exist cannot be stored."""
    rollout_id, attempt_id = span.rollout_id, span.attempt_id
    if isinstance(span, SpanDraft):
        rollout_id, attempt_id = decode_text(rollout_id), decode_text(attempt_id)
    return f"there is no attempt {attempt_id!r:.200} of a rollout {rollout_id!r:.200}"


def _check_escapes(document: bytes) -> None:
    if b"\\" in document and _TO_ESCAPE.search(document):
        raise _UnsureError


def _check_identifiers(*identifiers: str | None) -> None:
    for identifier in identifiers:
        if identifier is not None and (len(identifier) > _LONGEST_IDENTIFIER or "\x00" in identifier):
            raise _UnsureError


def _rollout_draft(rollout: _NewRollout) -> RolloutDraft:
    _check_identifiers(rollout.resources_id)
    config = rollout.config or _DEFAULTS
    if not 1 <= config.max_attempts <= _LARGEST_NUMBER:
        raise _UnsureError
    return RolloutDraft(
        new_rollout_id(),
        _payload_text(rollout.input),
        rollout.mode,
        rollout.resources_id,
        _seconds(config.timeout_seconds),
        _seconds(config.unresponsive_seconds),
        config.max_attempts,
        conditions_text(config.retry_condition),
        _metadata_text(rollout.metadata),
    )


_DEFAULTS: Final = _Config()


def _seconds(value: float | None) -> float | None:
    return None if value is None else unsigned_zero(value)


def _payload_text(raw: Raw) -> str | None:
    text = str(raw, "utf-8")
    if text == "null":
        return None
    _check_depth(text, _anything.decode(raw))
    return text


def _object_text(raw: Raw) -> str:
    text = str(raw, "utf-8")
    _check_depth(text, _object.decode(raw))
    return text


def _metadata_text(raw: Raw | UnsetType) -> str:
    return "{}" if raw is UNSET or bytes(raw) == b"null" else _object_text(raw)


def _check_depth(text: str, value: Any) -> None:
    if text.count("[") + text.count("{") > NESTING_LIMIT and deeper_than(value, NESTING_LIMIT):
        raise _UnsureError


def _check_lists(attributes: _Attributes) -> None:
    """The members of a list are of one type: others would be converted."""
    for value in attributes.values():
        if type(value) is list and len({type(member) for member in value}) > 1:
            raise _UnsureError


def _check_names(attributes: _Attributes, text: str) -> None:
    """Each name stands there once and as it is: of several SQLite's `->>` takes the first, and it sees no escapes."""
    colons = text.count('":')
    if "\\" in text:
        colons -= text.count('\\":')
        place = 0
        for name in attributes:
            place = text.find(f'"{name}":', place)
            if place < 0:
                raise _UnsureError
    if colons != len(attributes) or (_may_have_space(text) and _SPACE_BEHIND_A_NAME.search(text)):
        raise _UnsureError


def _may_have_space(text: str) -> bool:
    return '" ' in text or "\n" in text or "\t" in text or "\r" in text


def _attributes_text(raw: Raw) -> str:
    attributes = _attributes.decode(raw)
    text = str(raw, "utf-8")
    _check_names(attributes, text)
    if "[" in text:
        _check_lists(attributes)
    return text


def _status_text(raw: Raw) -> str:
    text = str(raw, "utf-8")
    return text if text in _USUAL_STATUSES else _checked_status(text)


_USUAL_STATUSES: Final = frozenset(
    f'{{"status_code":{space}"{code}",{space}"description":{space}null}}'
    for code in get_args(StatusCode)
    for space in ("", " ")
)


def _checked_status(text: str) -> str:
    _status.decode(text)
    return text


def _resource_text(raw: Raw) -> str:
    text = str(raw, "utf-8")
    return _short_resource(text) if len(text) <= _SHORT else _checked_resource(text)


def _checked_resource(text: str) -> str:
    _check_lists(_resource.decode(text).attributes)
    return text


_SHORT: Final = 1024
_short_resource: Final = lru_cache(maxsize=256)(_checked_resource)
"""The resource of a span is nearly always that of the one before."""


def _events_text(raw: Raw) -> str:
    text = str(raw, "utf-8")
    if text != "[]":
        for event in _events.decode(raw):
            _check_lists(event.attributes)
            if type(event.timestamp) is int:
                raise _UnsureError
    return text


def _links_text(raw: Raw) -> str:
    text = str(raw, "utf-8")
    if text != "[]":
        for link in _links.decode(raw):
            _check_lists(link.attributes or {})
    return text


def _context_text(raw: Raw) -> str | None:
    text = str(raw, "utf-8")
    if text == "null":
        return None
    _context.decode(raw)
    return text
