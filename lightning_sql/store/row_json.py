"""Rows of the native store as JSON, without records in between: what is stored is sent as it is.

Only rows with something in them that JSON cannot hold, and that is stored escaped for that reason, are
taken apart and written anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, Final, cast

import msgspec
from msgspec import Raw
from pydantic import BaseModel

from lightning_sql.database.dialects.hot import Row
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    RESOURCES_COLUMNS,
    ROLLOUT_COLUMNS,
    SPAN_COLUMNS,
    SPLICED_SPAN_COLUMNS,
    SPLICES,
    WORKER_COLUMNS,
)
from lightning_sql.database.payload import decode_json, decode_text, is_escaped

__all__ = [
    "ATTEMPTED_ROLLOUTS",
    "ATTEMPTS",
    "RESOURCES",
    "ROLLOUTS",
    "SPANS",
    "SPLICED_SPANS",
    "WORKERS",
    "Row",
    "RowForm",
    "encode_json",
]


def _record_fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    # A model's own dictionary holds its fields in the order of their declaration: nothing is copied.
    return {**vars(value), **value.model_extra} if value.model_extra else vars(value)


_encoder: Final = msgspec.json.Encoder(enc_hook=_record_fields)


def encode_json(value: Any, *, exact: bool = False) -> bytes:
    """The JSON text of records, mappings, sequences and scalars.

    It is valid JSON: a non-finite float is `null`, a lone surrogate is written as an escape. With `exact`,
    a non-finite float is written as Python writes it (`NaN`, `Infinity`).
    """
    if exact:
        return json.dumps(value, default=_record_fields, separators=(",", ":")).encode("ascii")
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # Lone surrogates: only the standard library can write them, as escapes.
        text = json.dumps(value, default=_record_fields)
        finite = json.loads(text, parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":"), allow_nan=False).encode("ascii")


_MARK: Final = b"\\u001a"
"""How an escaped text begins in JSON, and an escaped string inside a payload."""


def _is_marked(text: bytes) -> bool:
    # Looking for one byte is by far the cheapest; and `rfind` looks for the first byte of what it is given, which is
    # rare here, where `in` would look for the last one.
    return b"\\" in text and text.rfind(_MARK) >= 0


_INFINITE: Final = frozenset({math.inf, -math.inf})


class _ConfigDocument(msgspec.Struct, gc=False):
    timeout_seconds: Any
    unresponsive_seconds: Any
    max_attempts: int
    retry_condition: Raw


class _RolloutDocument(msgspec.Struct, gc=False):
    rollout_id: Any
    input: Any
    start_time: Any
    end_time: Any
    mode: str | None
    resources_id: Any
    status: str
    config: _ConfigDocument
    metadata: Any


class _AttemptDocument(msgspec.Struct, gc=False):
    rollout_id: Any
    attempt_id: Any
    sequence_id: int
    start_time: Any
    end_time: Any
    status: str
    worker_id: Any
    last_heartbeat_time: Any
    metadata: Any


class _AttemptedDocument(_RolloutDocument, gc=False):
    attempt: _AttemptDocument


class _NamedSpan(msgspec.Struct, gc=False):
    rollout_id: Any
    attempt_id: Any
    sequence_id: int
    trace_id: Any
    span_id: Any
    parent_id: Any
    name: Any


class _SpanDocument(_NamedSpan, gc=False):
    status: Raw
    attributes: Raw
    events: Raw
    links: Raw
    start_time: Any
    end_time: Any
    context: Raw | None
    parent: Raw | None
    resource: Raw


class _SplicedSpanDocument(_NamedSpan, gc=False, rename={"payloads": "status", "origin": "context"}):
    payloads: Raw
    start_time: Any
    end_time: Any
    origin: Raw


class _ResourcesDocument(msgspec.Struct, gc=False):
    resources_id: Any
    create_time: Any
    update_time: Any
    version: int
    resources: Raw


class _WorkerDocument(msgspec.Struct, gc=False):
    worker_id: Any
    status: str
    heartbeat_stats: Raw | None
    last_heartbeat_time: Any
    last_dequeue_time: Any
    last_busy_time: Any
    last_idle_time: Any
    current_rollout_id: Any
    current_attempt_id: Any


def _raw(text: str | None) -> Raw | None:
    return None if text is None else Raw(text)


def _rollout_document(row: Row) -> _RolloutDocument:
    return _RolloutDocument(
        row[0],
        _raw(row[1]),
        row[2],
        row[3],
        row[4],
        row[5],
        row[6],
        _ConfigDocument(row[7], row[8], row[9], Raw(row[10])),
        _raw(row[11]),
    )


def _attempt_document(row: Row) -> _AttemptDocument:
    rollout_id, attempt_id, sequence_id, start, end, status, worker_id, heartbeat, metadata, *_ = row
    return _AttemptDocument(
        rollout_id, attempt_id, sequence_id, start, end, status, worker_id, heartbeat, _raw(metadata)
    )


_ROLLOUT_WIDTH: Final = len(ROLLOUT_COLUMNS)


def _attempted_document(row: Row) -> _RolloutDocument:
    if row[_ROLLOUT_WIDTH] is None:
        return _rollout_document(row)
    return _AttemptedDocument(
        row[0],
        _raw(row[1]),
        row[2],
        row[3],
        row[4],
        row[5],
        row[6],
        _ConfigDocument(row[7], row[8], row[9], Raw(row[10])),
        _raw(row[11]),
        _attempt_document(row[_ROLLOUT_WIDTH:]),
    )


def _span_document(row: Row) -> _SpanDocument:
    (
        rollout_id,
        attempt_id,
        sequence_id,
        trace_id,
        span_id,
        parent_id,
        name,
        status,
        attributes,
        events,
        links,
        start_time,
        end_time,
        context,
        parent,
        resource,
        *_,
    ) = row
    return _SpanDocument(
        rollout_id,
        attempt_id,
        sequence_id,
        trace_id,
        span_id,
        parent_id,
        name,
        Raw(status),
        Raw(attributes),
        Raw(events),
        Raw(links),
        start_time,
        end_time,
        None if context is None else Raw(context),
        None if parent is None else Raw(parent),
        Raw(resource),
    )


def _spliced_span_document(row: Row) -> _SplicedSpanDocument:
    return _SplicedSpanDocument(
        row[0],
        row[1],
        row[2],
        row[3],
        row[4],
        row[5],
        row[6],
        Raw(row[7]),
        row[8],
        row[9],
        Raw(row[10]),
    )


def _resources_document(row: Row) -> _ResourcesDocument:
    resources_id, created, updated, version, resources = row
    return _ResourcesDocument(resources_id, created, updated, version, Raw(resources))


def _worker_document(row: Row) -> _WorkerDocument:
    worker_id, status, stats, heartbeat, dequeue, busy, idle, rollout_id, attempt_id = row
    return _WorkerDocument(worker_id, status, _raw(stats), heartbeat, dequeue, busy, idle, rollout_id, attempt_id)


_TEXTS: Final = frozenset(
    {
        "rollout_id",
        "resources_id",
        "attempt_id",
        "worker_id",
        "trace_id",
        "span_id",
        "parent_id",
        "name",
        "current_rollout_id",
        "current_attempt_id",
    }
)
_PAYLOADS: Final = frozenset(
    {"input", "metadata", "attributes", "events", "links", "context", "parent", "resource", "extra", "heartbeat_stats"}
)


def _text_out(stored: str, exact: bool) -> str | Raw:  # noqa: ARG001 - one signature for all kinds of columns
    # Only the standard library can write a lone surrogate, as an escape.
    return Raw(json.dumps(decode_text(stored))) if is_escaped(stored) else stored


def _payload_out(stored: str, exact: bool) -> str:
    return encode_json(decode_json(stored), exact=exact).decode() if "\\u001a" in stored else stored


def _splice_out(stored: str, exact: bool) -> str:
    return _payload_out(f'{{"":{stored}}}', exact)[4:-1] if "\\u001a" in stored else stored


def _real_out(stored: float, exact: bool) -> float | Raw:
    return Raw(json.dumps(stored)) if exact and stored in _INFINITE else stored


def _unchanged(stored: Any, exact: bool) -> Any:  # noqa: ARG001
    return stored


class RowForm:
    """How the rows of one kind are written as JSON: every field, in the order of the record.

    Args:
        document: from a row to what is encoded.
        columns: of the rows.
        payloads: those of the columns that hold JSON here and text in other kinds.
        extra: which column holds more keys of the object, if any.
    """

    def __init__(
        self,
        document: Callable[[Row], msgspec.Struct],
        columns: Sequence[str],
        *,
        payloads: Collection[str] = (),
        extra: int | None = None,
    ) -> None:
        self._document = document
        self._extra = extra
        self._writers: list[Callable[[Any, bool], Any]] = []
        reals: list[int] = []
        for index, column in enumerate(columns):
            if column in SPLICES:
                self._writers.append(_splice_out)
            elif column in _PAYLOADS or column in payloads:
                self._writers.append(_payload_out)
            elif column in _TEXTS:
                self._writers.append(_text_out)
            elif column.endswith(("_time", "_seconds")):
                self._writers.append(_real_out)
                reals.append(index)
            else:
                self._writers.append(_unchanged)
        self._reals = itemgetter(*reals)

    def one(self, row: Row, *, exact: bool = False) -> bytes:
        """A row as a JSON object. With `exact`, non-finite floats are as in `encode_json`."""
        if self._extra is not None and row[self._extra] is not None:
            return self._with_extra(row, exact)
        if not (exact and self._has_infinite(row)):
            text = _encoder.encode(self._document(row))
            if not _is_marked(text):
                return text
        return _encoder.encode(self._document(self._readable(row, exact)))

    def array(self, rows: Sequence[Row], *, exact: bool = False) -> bytes:
        """Rows as a JSON array of objects; of each row, what comes after its own columns is left out."""
        if self._extra is not None and any(row[self._extra] is not None for row in rows):
            return b"[" + b",".join([self.one(row, exact=exact) for row in rows]) + b"]"
        if not (exact and any(self._has_infinite(row) for row in rows)):
            text = _encoder.encode([self._document(row) for row in rows])
            if not _is_marked(text):
                return text
        return _encoder.encode([self._document(self._readable(row, exact)) for row in rows])

    def _has_infinite(self, row: Row) -> bool:
        return not _INFINITE.isdisjoint(self._reals(row))

    def _readable(self, row: Row, exact: bool) -> Row:
        """The row, with nothing in it that is escaped, and infinite floats as they are to be written."""
        return [
            None if value is None else write(value, exact) for write, value in zip(self._writers, row, strict=False)
        ]

    def _with_extra(self, row: Row, exact: bool) -> bytes:
        readable = self._readable(row, exact)
        text = _encoder.encode(self._document(readable))
        more: bytes = readable[cast(int, self._extra)].encode()
        members = more.strip()[1:]
        return text if members.strip() == b"}" else text[:-1] + b"," + members


ROLLOUTS: Final = RowForm(_rollout_document, ROLLOUT_COLUMNS)
"""Rollouts alone; what else is in their rows is left out."""
ATTEMPTED_ROLLOUTS: Final = RowForm(_attempted_document, ROLLOUT_COLUMNS + ATTEMPT_COLUMNS)
"""Rollouts, with their attempts where they have one."""
ATTEMPTS: Final = RowForm(_attempt_document, ATTEMPT_COLUMNS)
SPANS: Final = RowForm(_span_document, SPAN_COLUMNS, payloads=("status",), extra=SPAN_COLUMNS.index("extra"))
SPLICED_SPANS: Final = RowForm(_spliced_span_document, SPLICED_SPAN_COLUMNS, extra=SPLICED_SPAN_COLUMNS.index("extra"))
RESOURCES: Final = RowForm(_resources_document, RESOURCES_COLUMNS, payloads=("resources",))
WORKERS: Final = RowForm(_worker_document, WORKER_COLUMNS)
