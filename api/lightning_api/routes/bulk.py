"""Many spans in one request, with an answer for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from lightning_api.calls import Call
from lightning_api.errors import InvalidPartError, problem_of, rejection
from lightning_api.models import SpanList, SpansReceipt
from lightning_api.operations import JsonBody, Operation, operation
from lightning_api.payloads import BODY_DEPTH, MalformedJsonError, UndecodableBodyError, decode_json, encode_json
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_sql.errors import UnstorableValueError
from lightning_sql.records import IdempotencyKey, Span
from lightning_sql.store import documents
from lightning_sql.store.documents import SpanDraft, SpanOutcome
from lightning_sql.store.interface import LightningStore, SpanReceipt, check_import
from lightning_sql.store.row_store import RowStore

__all__ = ["CHUNK_BYTES", "CHUNK_SPANS", "NDJSON", "OPERATIONS"]

S = TypeVar("S", Span, SpanDraft)

NDJSON: Final = "application/x-ndjson"

CHUNK_SPANS: Final = 1000
CHUNK_BYTES: Final = 8 * 1024 * 1024
"""So many spans, and about so many bytes of them, go to the store at once at most."""

_BREATH_SPANS: Final = 200
"""After reading so many spans, other requests get their turn."""

_span: Final[TypeAdapter[Span]] = TypeAdapter(Span)


@dataclass(frozen=True, slots=True)
class _Value:
    """A span whose JSON was read already."""

    value: Any


_Unread: TypeAlias = bytes | _Value


@dataclass(frozen=True, slots=True)
class _Offered:
    """The spans of a request, and the places of those that have no number."""

    spans: Sequence[_Unread]
    unnumbered: AbstractSet[int] = frozenset()


class SpanListBody(JsonBody[_Offered]):
    """Spans, in one JSON document or each in a line of its own; they are not looked into."""

    def __init__(self) -> None:
        super().__init__(SpanList, more_types={NDJSON: {"type": "string", "description": "A span in each line."}})

    @override
    async def read(self, call: Call) -> _Offered:
        """The documents of the spans.

        Raises:
            InvalidPartError: the body is not declared as, or not of, the form `{"spans": […]}`.
            MalformedJsonError: it is not JSON.
        """
        media_type = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if media_type == NDJSON.encode():
            return _Offered([line for line in (await call.body()).split(b"\n") if line.strip()])
        body = await call.plain_body()
        if not body:
            raise _invalid("missing", (), f"A body of JSON or {NDJSON} is required")
        if not body.isascii():
            try:
                body.decode()
            except UnicodeDecodeError:
                raise MalformedJsonError("the body is not UTF-8") from None
        found = documents.read_span_list(body)
        if found is not None:
            return _Offered(found[0], frozenset(found[1]))
        return _read_values(body)


def _read_values(body: bytes) -> _Offered:
    # A span stands two levels below the root.
    value = decode_json(body, BODY_DEPTH + 2)
    if not isinstance(value, dict):
        raise _invalid("dict_type", (), "Input should be an object")
    if "spans" not in value:
        raise _invalid("missing", ("spans",), "Field required")
    spans = cast(dict[str, Any], value)["spans"]
    if not isinstance(spans, list):
        raise _invalid("list_type", ("spans",), "Input should be a list")
    unnumbered = cast(dict[str, Any], value).get("unnumbered", [])
    if not isinstance(unnumbered, list) or any(type(place) is not int for place in cast(list[Any], unnumbered)):
        raise _invalid("list_type", ("unnumbered",), "Input should be a list of integers")
    return _Offered([_Value(span) for span in cast(list[Any], spans)], frozenset(cast(list[int], unnumbered)))


def _invalid(kind: str, location: tuple[str, ...], message: str) -> InvalidPartError:
    return InvalidPartError("body", [{"type": kind, "loc": location, "msg": message, "input": None}])


def _record(unread: _Unread) -> Span | str:
    """A span, or why it is none."""
    try:
        value = unread.value if isinstance(unread, _Value) else decode_json(unread)
        return _span.validate_python(value, from_attributes=True)
    except ValidationError as error:
        return rejection(error)
    except MalformedJsonError as error:
        return f"this cannot be read as JSON: {error.reason}"
    except UndecodableBodyError:
        return "this is not UTF-8"


def _draft(unread: _Unread) -> SpanDraft | str:
    """A span as its row, or why it cannot be stored."""
    if not isinstance(unread, _Value):
        draft = documents.read_span(unread)
        if draft is not None:
            return draft
    record = _record(unread)
    return record if isinstance(record, str) else _draft_of(record)


def _draft_of(record: Span) -> SpanDraft | str:
    try:
        return documents.span_draft(record)
    except UnstorableValueError as error:
        return str(error)


def _storable(unread: _Unread) -> Span | str:
    """A span, or why it cannot be stored."""
    record = _record(unread)
    if isinstance(record, str):
        return record
    draft = _draft_of(record)
    return draft if isinstance(draft, str) else record


async def _read_each(read: Callable[[_Unread], S | str], unread: Sequence[_Unread]) -> list[S | str]:
    found: list[S | str] = []
    for start in range(0, len(unread), _BREATH_SPANS):
        if start:
            await asyncio.sleep(0)
        found += [read(document) for document in unread[start : start + _BREATH_SPANS]]
    return found


def _chunks(drafts: Sequence[SpanDraft]) -> Iterator[Sequence[SpanDraft]]:
    start = size = 0
    for index, draft in enumerate(drafts):
        length = documents.span_size(draft)
        if index > start and (index - start == CHUNK_SPANS or size + length > CHUNK_BYTES):
            yield drafts[start:index]
            start, size = index, 0
        size += length
    if start < len(drafts):
        yield drafts[start:]


async def _add(rows: RowStore, drafts: Sequence[SpanDraft], key: IdempotencyKey | None) -> list[SpanOutcome]:
    outcomes: list[SpanOutcome] = []
    for part, chunk in enumerate(_chunks(drafts)):
        outcomes += await rows.add_span_rows(chunk, strict=False, idempotency_key=key, part=part)
    return outcomes


def _key_of_portion(key: IdempotencyKey | None, start: int) -> IdempotencyKey | None:
    if key is None or not start:
        return key
    # No caller can send NUL, and so no key of its own that is this one.
    return key._replace(key="\0" + blake2b(f"{start} {key.key}".encode(), digest_size=16).hexdigest())


def _key(span: Span) -> tuple[str, str, str]:
    return span.rollout_id, span.attempt_id, span.span_id


async def _import(store: LightningStore, spans: Sequence[Span], key: IdempotencyKey | None) -> list[SpanOutcome]:
    outcomes: list[SpanOutcome] = []
    for start in range(0, len(spans), CHUNK_SPANS):
        chunk = spans[start : start + CHUNK_SPANS]
        receipt = await store.import_spans(chunk, idempotency_key=_key_of_portion(key, start))
        outcomes += _outcomes(chunk, receipt)
    return outcomes


def _outcomes(spans: Sequence[Span], receipt: SpanReceipt) -> Iterator[SpanOutcome]:
    """What became of each span."""
    rejected = {_key(span) for span in receipt.rejected}
    stored = {_key(span) for span in receipt.stored}
    for span in spans:
        ids = _key(span)
        if ids in rejected:
            yield SpanOutcome.UNKNOWN
        elif ids in stored:
            # Of equal ones the first was stored.
            stored.remove(ids)
            yield SpanOutcome.STORED
        else:
            yield SpanOutcome.DUPLICATE


_DUPLICATE: Final = b'{"status":"duplicate"}'


def _rejected(reason: str) -> bytes:
    return encode_json({"status": "rejected", "reason": reason})


def _receipt(read: Sequence[Span | SpanDraft | str], outcomes: Iterable[SpanOutcome]) -> Reply:
    following = iter(outcomes)
    results: list[bytes] = []
    counts = dict.fromkeys(SpanOutcome, 0)
    for span in read:
        outcome = SpanOutcome.UNKNOWN if isinstance(span, str) else next(following)
        counts[outcome] += 1
        if isinstance(span, str):
            results.append(_rejected(span))
        elif outcome is SpanOutcome.STORED:
            results.append(b'{"status":"stored","sequence_id":%d}' % span.sequence_id)
        elif outcome is SpanOutcome.DUPLICATE:
            results.append(_DUPLICATE)
        else:
            results.append(_rejected(documents.unknown_attempt(span)))
    body = b'{"results":[%b],"stored":%d,"duplicates":%d,"rejected":%d}' % (
        b",".join(results),
        counts[SpanOutcome.STORED],
        counts[SpanOutcome.DUPLICATE],
        counts[SpanOutcome.UNKNOWN],
    )
    return Reply(200, body, JSON_HEADERS)


async def _number(store: LightningStore, offered: _Offered) -> Reply:
    """Store spans of which some get their numbers here."""
    read = await _read_each(_storable, offered.spans)
    spans = [span for span in read if not isinstance(span, str)]
    places = [place for place, span in enumerate(read) if not isinstance(span, str)]
    unnumbered = {index for index, place in enumerate(places) if place in offered.unnumbered}
    outcomes: list[SpanOutcome] = []
    numbers: dict[tuple[str, str, str], int] = {}
    for start in range(0, len(spans), CHUNK_SPANS):
        chunk = spans[start : start + CHUNK_SPANS]
        here = {index - start for index in unnumbered if start <= index < start + len(chunk)}
        receipt = await store.import_spans(chunk, unnumbered=here)
        numbers |= {_key(span): span.sequence_id for span in receipt.stored}
        outcomes += _outcomes(chunk, receipt)
    numbered = iter(
        span.model_copy(update={"sequence_id": numbers.get(_key(span), span.sequence_id)}) for span in spans
    )
    return _receipt([span if isinstance(span, str) else next(numbered) for span in read], outcomes)


def _to_error(_call: Call, error: Exception) -> Reply:
    return problem_of(error)


@operation(
    "POST",
    "/v1/lightning/spans",
    SpanListBody(),
    returns=SpansReceipt,
    errors=(400, 503),
    tag="spans",
    to_error=_to_error,
    problems=True,
    hot=True,
    keyed=True,
)
async def add_spans(call: Call, offered: _Offered) -> Reply:
    """Store spans of any attempts; one that cannot be stored does not keep the others from it."""
    key = await call.idempotency_key()
    check_import(offered.unnumbered, key)
    if offered.unnumbered:
        return await _number(call.store, offered)
    unread = offered.spans
    rows = call.store.rows
    if rows is not None:
        drafts = await _read_each(_draft, unread)
        return _receipt(drafts, await _add(rows, [draft for draft in drafts if not isinstance(draft, str)], key))
    spans = await _read_each(_storable, unread)
    return _receipt(spans, await _import(call.store, [span for span in spans if not isinstance(span, str)], key))


OPERATIONS: Final[tuple[Operation, ...]] = (add_spans,)
