"""Whatever is sent to the OTLP route is answered, with a success or a 4xx, and in bounded memory."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httpx
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lightning_api import otlp, otlp_limits
from lightning_api.app import create_app
from lightning_api.errors import BodyTooLargeError
from lightning_api.otlp_limits import MalformedExportError, check_fields, decompress
from lightning_api.settings import Settings
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.rows import span_draft
from tests.backends import POSTGRES, SQLITE, NewStore
from tests.properties.effort import effort
from tests.properties.strategies import short_texts

BODY_LIMIT = 20_000
ROLLOUT, ATTEMPT, NUMBER = (f"agentlightning.{name}" for name in ("rollout_id", "attempt_id", "span_sequence_id"))

utf8_texts = short_texts.map(lambda text: text.encode("utf-8", "replace").decode())
integers64 = st.integers(-(2**63), 2**63 - 1)
nanoseconds = st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
values: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"string_value": utf8_texts}),
        st.fixed_dictionaries({"bool_value": st.booleans()}),
        st.fixed_dictionaries({"int_value": integers64}),
        st.fixed_dictionaries({"double_value": st.floats()}),
        st.fixed_dictionaries({"bytes_value": st.binary(max_size=5)}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: {"array_value": {"values": items}}),
        st.dictionaries(utf8_texts, inner, max_size=3).map(
            lambda items: {"kvlist_value": {"values": [{"key": key, "value": value} for key, value in items.items()]}}
        ),
    ),
    max_leaves=6,
)
attributes = st.lists(st.fixed_dictionaries({"key": utf8_texts, "value": values}), max_size=4)
odd_ids = st.sampled_from(["", "-", "latest", "\x00", "x" * 600, "/"]) | utf8_texts
numbers = values | st.fixed_dictionaries({"int_value": st.integers(0, 3)})


def identity(name: str, value: Any) -> dict[str, Any]:
    return {"key": name, "value": value if isinstance(value, dict) else {"string_value": value}}


@st.composite
def exports(draw: st.DrawFn, rollout_id: str, attempt_id: str) -> bytes:
    """Export requests of spans, some of an attempt that there is."""
    spans: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 3))):
        held = draw(attributes)
        if draw(st.integers(0, 4)):
            held = [
                *held,
                identity(ROLLOUT, rollout_id if draw(st.integers(0, 4)) else draw(odd_ids)),
                identity(ATTEMPT, attempt_id if draw(st.integers(0, 4)) else draw(odd_ids)),
                *([identity(NUMBER, draw(numbers))] if draw(st.booleans()) else []),
            ]
        spans.append(
            {
                "trace_id": draw(st.binary(max_size=20)),
                "span_id": draw(st.binary(max_size=10) | st.just(b"x" * 300)),
                "parent_span_id": draw(st.binary(max_size=10)),
                "name": draw(utf8_texts),
                "attributes": held,
                "start_time_unix_nano": draw(nanoseconds),
                "end_time_unix_nano": draw(nanoseconds),
                "status": {"code": draw(st.integers(0, 5)), "message": draw(st.just("") | utf8_texts)},
                "events": [
                    {"name": draw(utf8_texts), "time_unix_nano": draw(nanoseconds), "attributes": draw(attributes)}
                    for _ in range(draw(st.integers(0, 1)))
                ],
                "links": [
                    {"trace_id": draw(st.binary(max_size=3)), "attributes": draw(attributes)}
                    for _ in range(draw(st.integers(0, 1)))
                ],
            }
        )
    resource_spans = {
        "resource": {"attributes": draw(attributes)},
        "schema_url": draw(utf8_texts),
        "scope_spans": [{"spans": spans}],
    }
    return ExportTraceServiceRequest(resource_spans=cast(Any, [resource_spans])).SerializeToString()


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes with a piece cut off, taken out, put in, flipped or doubled; mostly as they were."""
    place = draw(st.integers(0, len(body)))
    match draw(st.sampled_from(["nothing", "nothing", "cut", "remove", "insert", "flip", "double"])):
        case "cut":
            return body[:place]
        case "remove":
            return body[:place] + body[place + draw(st.integers(1, 8)) :]
        case "insert":
            return body[:place] + draw(st.binary(min_size=1, max_size=8)) + body[place:]
        case "flip" if place < len(body):
            return body[:place] + bytes([body[place] ^ 1 << draw(st.integers(0, 7))]) + body[place + 1 :]
        case "double":
            return body + body[place:]
        case _:
            return body


# What is drawn must not depend on the time, which a gzip file holds.
packed = partial(gzip.compress, mtime=0)

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": packed,
    "GZIP ": packed,
    "identity": lambda body: body,
    "deflate": zlib.compress,
    "br": lambda body: body,
    "gzip, gzip": lambda body: packed(packed(body)),
}
content_types = st.sampled_from(
    [otlp.CONTENT_TYPE] * 8 + ["application/json", "text/plain", "", "application/x-protobuf;q=\xe9", "\x01/\x02", "é"]
)


@effort(500)
@given(exports("ro-1", "at-1"))
def test_rows_are_what_becomes_of_the_records(body: bytes) -> None:
    records, rows = otlp.decode_export(body), otlp.decode_export_rows(body)
    assert rows.spans == [span_draft(record) for record in records.spans]
    assert (rows.unnumbered, rows.unroutable, rows.rejected) == (
        records.unnumbered,
        records.unroutable,
        records.rejected,
    )


class Exporter:
    """A client of a service that takes little, over a store with one attempt, and its event loop."""

    def __init__(self, store: LightningStore, runner: asyncio.Runner) -> None:
        app = create_app(Settings(database_url="memory://", body_limit=BODY_LIMIT), store)
        # An exception that the service does not answer itself fails the test.
        transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=True)
        self.store, self.runner = store, runner
        self.client = httpx.AsyncClient(transport=transport, base_url="http://service")
        started = runner.run(store.start_rollout(1))
        self.rollout_id, self.attempt_id = started.rollout_id, started.attempt.attempt_id

    def export(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return self.runner.run(self.client.post("/v1/traces", content=body, headers=encoded))

    def spans(self) -> int:
        return self.runner.run(self.store.query_spans(self.rollout_id, limit=1)).total

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.run(self.store.close())


@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])
def test_anything_is_answered(kind: str, new_store: NewStore) -> None:
    with asyncio.Runner() as runner:
        exporter = Exporter(new_store(kind, scan_debounce_seconds=10.0), runner)
        stored = 0

        @effort(80)
        @given(data=st.data(), coding=st.sampled_from(["", "", "gzip", *CODINGS]), content_type=content_types)
        def check(data: st.DataObject, coding: str, content_type: str) -> None:
            nonlocal stored
            sound = exports(exporter.rollout_id, exporter.attempt_id)
            plain = data.draw(damaged(data.draw(sound)) if data.draw(st.integers(0, 9)) else st.binary(max_size=40))
            body = data.draw(damaged(CODINGS[coding](plain))) if coding else plain
            headers = {"content-type": content_type, "accept-encoding": "identity"}
            answer = exporter.export(body, headers | ({"content-encoding": coding} if coding else {}))
            assert answer.status_code in (200, 400, 413), answer.content
            assert answer.headers["content-type"] == otlp.CONTENT_TYPE
            if answer.status_code == 200:
                ExportTraceServiceResponse.FromString(answer.content)
                assert content_type.startswith(otlp.CONTENT_TYPE)
                assert coding in ("", "gzip", "GZIP ", "identity")
                stored = exporter.spans()
            else:
                assert exporter.spans() == stored

        try:
            check()
        finally:
            exporter.close()


@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])
def test_a_sound_export_is_stored_wherever_it_is_cut_it_is_not(kind: str, new_store: NewStore) -> None:
    """Every prefix of a gzip file is refused; one of protobuf may be a smaller export, and is one then."""
    with asyncio.Runner() as runner:
        exporter = Exporter(new_store(kind), runner)
        held = [identity(ROLLOUT, exporter.rollout_id), identity(ATTEMPT, exporter.attempt_id)]
        span: Any = {"span_id": b"s", "attributes": held}
        request = ExportTraceServiceRequest(resource_spans=cast(Any, [{"scope_spans": [{"spans": [span]}]}]))
        zipped = gzip.compress(request.SerializeToString())
        headers = {"content-type": otlp.CONTENT_TYPE, "content-encoding": "gzip"}
        try:
            for length in range(1, len(zipped)):
                assert exporter.export(zipped[:length], headers).status_code == 400, length
            assert exporter.spans() == 0
            assert exporter.export(zipped, headers).status_code == 200
            assert exporter.spans() == 1
        finally:
            exporter.close()


# Bombs


def field(number: int, content: bytes) -> bytes:
    """A field of bytes on the wire."""
    length, varint = len(content), b""
    while length >= 0x80:
        varint += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + varint + bytes([length]) + content


def of_a_span(content: bytes) -> bytes:
    return field(1, field(2, field(2, content)))


BOMBS: dict[str, Callable[[int], bytes]] = {
    "resources": lambda count: field(1, b"") * count,
    "scopes": lambda count: field(1, field(2, b"") * count),
    "spans": lambda count: field(1, field(2, field(2, b"") * count)),
    "attributes": lambda count: of_a_span(field(9, b"") * count),
    "events": lambda count: of_a_span(field(11, b"") * count),
    "links": lambda count: of_a_span(field(13, b"") * count),
    "values": lambda count: of_a_span(field(9, field(2, field(5, field(1, b"") * count)))),
    "numbers": lambda count: of_a_span(b"\x30\x01" * count),
    "unknown fields": lambda count: b"\x7a\x00" * count,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_too_many_fields_are_too_many_wherever_they_are(kind: str) -> None:
    check_fields(BOMBS[kind](900), 1000)
    with pytest.raises(BodyTooLargeError):
        check_fields(BOMBS[kind](1001), 1000)


def test_the_parser_never_sees_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of gzip hold millions of empty messages, and those would be hundreds of megabytes of objects."""

    class Parser:
        def __init__(self) -> None:
            pytest.fail("the parser was asked")

    monkeypatch.setattr(otlp, "ExportTraceServiceRequest", Parser)
    body = BOMBS["spans"](otlp_limits.FIELDS)
    bomb = gzip.compress(body)
    assert len(bomb) < 10_000
    assert decompress(bomb, len(body)) == body
    with pytest.raises(BodyTooLargeError):
        otlp.decode_export(body)


@pytest.mark.parametrize("kind", ["spans", "events", "links"])
def test_an_export_of_too_many_records_is_refused(kind: str) -> None:
    assert otlp.decode_export(BOMBS[kind](1000)).spans == []
    with pytest.raises(BodyTooLargeError):
        otlp.decode_export(BOMBS[kind](otlp.RECORDS + 1))


def test_unpacking_takes_no_more_than_is_allowed() -> None:
    limit = 2**20
    bomb = gzip.compress(b"\x00" * 2**26)
    tracemalloc.start()
    try:
        for body in (bomb, bomb * 3, gzip.compress(b"x" * limit) + bomb):
            tracemalloc.reset_peak()
            with pytest.raises(BodyTooLargeError):
                decompress(body, limit)
        assert tracemalloc.get_traced_memory()[1] < 8 * limit
    finally:
        tracemalloc.stop()


def test_a_gzip_file_of_very_many_files_is_refused() -> None:
    """Going on behind each of them would take a time that grows with the square of their number."""
    empty = gzip.compress(b"")
    assert decompress(empty * 1000, 1) == b""
    for many in (1001, 1_000_000):
        with pytest.raises(MalformedExportError):
            decompress(empty * many, 1)


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 3), st.integers(0, 9))
@effort(200)
def test_unpacking_gives_what_was_packed(parts: list[bytes], zeros: int, level: int) -> None:
    body = b"".join(gzip.compress(part, level) + bytes(zeros) for part in parts)
    assert decompress(body, 1000) == b"".join(parts)


def messages_in(message: Message) -> int:
    """How many messages stand in a message, at all levels."""
    count = 0
    for described, value in message.ListFields():
        if described.message_type is not None:
            items = [value] if isinstance(value, Message) else list(value)
            count += len(items) + sum(messages_in(item) for item in items)
    return count


def passes(body: bytes, most: int) -> bool:
    try:
        otlp_limits._count_fields(body, most)
    except (BodyTooLargeError, IndexError, otlp_limits._NoProtobufError):
        return False
    return True


@given(data=st.data())
@effort(100)
def test_the_parser_makes_no_more_messages_than_were_counted(data: st.DataObject) -> None:
    sound = data.draw(exports("r", "a"))
    assert passes(sound, len(sound))
    body = data.draw(damaged(sound))
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return
    messages = messages_in(request)
    if messages:
        assert not passes(body, messages - 1)


@pytest.mark.parametrize("tag", [3, 4, 6, 7])
def test_what_is_not_understood_is_not_passed_on(tag: int) -> None:
    """A group, or a kind of field that there is not, could hide any number of fields from the count."""
    odd = bytes([8 | tag]) + b"\x00" * 30
    for body in (odd, of_a_span(odd), b"\xff" * 30, b"\x0a\x7f" + b"\x00" * 30):
        with pytest.raises(MalformedExportError):
            check_fields(body, len(body) // 3)
