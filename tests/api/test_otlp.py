"""OTLP/HTTP in protobuf."""

import gzip
import json
import math
import zlib
from typing import Any

import pytest
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from lightning_api.otlp import decompress, gzip_wanted
from lightning_sql.errors import DatabaseUnavailableError

V1 = "/v1/agl"
PROTOBUF = "application/x-protobuf"
GZIP = {"content-encoding": "gzip"}
ROLLOUT, ATTEMPT, NUMBER = (f"agentlightning.{name}" for name in ("rollout_id", "attempt_id", "span_sequence_id"))


def any_value(value: Any) -> AnyValue:
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=pairs(value)))
        case _:
            raise TypeError(value)


def pairs(values: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


class Exported:
    """An export request under construction."""

    def __init__(self) -> None:
        self.request = ExportTraceServiceRequest()
        self._count = 0

    def resource(self, **attributes: Any) -> "Exported":
        added = self.request.resource_spans.add(schema_url="schema")
        added.resource.attributes.extend(pairs({key.replace("__", "."): value for key, value in attributes.items()}))
        added.scope_spans.add()
        return self

    def span(self, attributes: dict[str, Any], **fields: Any) -> "Exported":
        self._count += 1
        span = (
            self.request.resource_spans[-1]
            .scope_spans[-1]
            .spans.add(
                **{"trace_id": b"\x01" * 16, "span_id": self._count.to_bytes(8, "big"), "name": f"span {self._count}"}
                | fields
            )
        )
        span.attributes.extend(pairs(attributes))
        return self

    @property
    def body(self) -> bytes:
        return self.request.SerializeToString()


def routing(rollout: dict[str, Any], number: Any = ...) -> dict[str, Any]:
    found = {ROLLOUT: rollout["rollout_id"], ATTEMPT: rollout["attempt"]["attempt_id"]}
    return found if number is ... else found | {NUMBER: number}


async def start(client: Any) -> dict[str, Any]:
    return (await client.post(f"{V1}/rollouts", json={"input": 1})).json()


async def export(client: Any, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """Send an export and parse what comes back."""
    sent = {"content-type": PROTOBUF, "accept-encoding": "identity"} | (headers or {})
    answer = await client.post("/v1/traces", content=body, headers=sent)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROTOBUF
    message: Message = ExportTraceServiceResponse() if status == 200 else Status()
    message.ParseFromString(answer.content)
    return message


async def stored(client: Any, rollout: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.get(f"{V1}/spans", params={"rollout_id": rollout["rollout_id"]})
    return json.loads(answer.content)["items"]


async def test_a_span_is_converted(client: Any) -> None:
    rollout = await start(client)
    request = Exported().resource(service="s", raw=b"\xab\x01")
    request.span(
        routing(rollout)
        | {"int": 1, "float": 1.0, "bool": False, "bytes": b"\xff\x00", "list": [1.5, 2.5], "empty": []},
        trace_id=b"\x0a\x0b",
        parent_span_id=b"\x01",
        start_time_unix_nano=1_700_000_001_250_000_000,
        end_time_unix_nano=0,
        kind=3,
        trace_state="a=b",
        dropped_attributes_count=3,
    )
    span = request.request.resource_spans[0].scope_spans[0].spans[0]
    span.status.CopyFrom(SpanStatus(code=SpanStatus.STATUS_CODE_ERROR, message="broke"))
    event = span.events.add(name="e", time_unix_nano=1_000_000_000)
    event.attributes.extend(pairs({"n": 1}))
    span.events.add(name="", time_unix_nano=0)
    span.links.add(trace_id=b"\x02" * 16, span_id=b"\x03" * 8, trace_state="c=d")
    span.links.add(trace_id=b"\x02", span_id=b"\x03").attributes.extend(pairs({"n": 1}))
    assert await export(client, request.body) == ExportTraceServiceResponse()
    context = {"trace_id": "0a0b".zfill(32), "span_id": "1".zfill(16), "is_remote": False, "trace_state": {}}
    link = {"trace_id": "02" * 16, "span_id": "03" * 8, "is_remote": False, "trace_state": {}}
    assert await stored(client, rollout) == [
        {
            "rollout_id": rollout["rollout_id"],
            "attempt_id": rollout["attempt"]["attempt_id"],
            "sequence_id": 1,
            "trace_id": context["trace_id"],
            "span_id": context["span_id"],
            "parent_id": "01".zfill(16),
            "name": "span 1",
            "status": {"status_code": "ERROR", "description": "broke"},
            "attributes": routing(rollout)
            | {"int": 1, "float": 1.0, "bool": False, "bytes": "ff00", "list": [1.5, 2.5], "empty": []},
            "events": [
                {"name": "e", "attributes": {"n": 1}, "timestamp": 1.0},
                {"name": "", "attributes": {}, "timestamp": None},
            ],
            "links": [
                {"context": link, "attributes": None},
                {
                    "context": link | {"trace_id": "02".zfill(32), "span_id": "03".zfill(16)},
                    "attributes": {"n": 1},
                },
            ],
            "start_time": 1_700_000_001.25,
            "end_time": None,
            "context": context,
            "parent": None,
            "resource": {"attributes": {"service": "s", "raw": "ab01"}, "schema_url": "schema"},
        }
    ]


async def test_odd_attributes_cost_only_their_shape(client: Any) -> None:
    rollout = await start(client)
    odd = {"map": {"a": {"b": [1, None]}}, "nothing": None, "mixed": [1, "x"], "nested": [[1]], "nan": math.nan}
    odd |= {"bytes": [b"\x01", b"\x02"], "holes": [1, None], "empty map": {}, "nul": "\x00"}
    request = Exported().resource(map={"a": 1}, nothing=None).span(routing(rollout) | odd)
    request.span(routing(rollout))
    assert await export(client, request.body) == ExportTraceServiceResponse()
    first, second = await stored(client, rollout)
    attributes = {key: value for key, value in first["attributes"].items() if not key.startswith("agent")}
    assert attributes == {
        "map": '{"a": {"b": [1, null]}}',
        "mixed": '[1, "x"]',
        "nested": "[[1]]",
        "nan": None,
        "bytes": ["01", "02"],
        "holes": "[1, null]",
        "empty map": "{}",
        "nul": "\x00",
    }
    assert second["attributes"] == routing(rollout)
    assert second["resource"]["attributes"] == {"map": '{"a": 1}'}


async def test_routing_ids_are_read_key_by_key(client: Any) -> None:
    rollout, other = await start(client), await start(client)
    request = Exported().resource(**routing(rollout, 7))
    request.span({}).span({NUMBER: 9}).span({ATTEMPT: rollout["attempt"]["attempt_id"]}).span(routing(other))
    request.span({ROLLOUT: None, NUMBER: None})
    assert await export(client, request.body) == ExportTraceServiceResponse()
    assert [(s["name"], s["sequence_id"]) for s in await stored(client, rollout)] == [
        ("span 1", 7),
        ("span 3", 7),
        ("span 5", 7),
        ("span 2", 9),
    ]
    assert [(s["name"], s["sequence_id"]) for s in await stored(client, other)] == [("span 4", 7)]


async def test_ids_become_text(client: Any) -> None:
    request = Exported().resource().span({ROLLOUT: 5, ATTEMPT: True})
    response = await export(client, request.body)
    assert response.partial_success.rejected_spans == 1
    assert "'True'" in response.partial_success.error_message
    assert "'5'" in response.partial_success.error_message


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0, 0), (7, 7), ("7", 7), ("0", 0), (2**62 - 1, 2**62 - 1)]
    + [(value, None) for value in (-1, "-1", 7.0, True, "x", "", "7.5", None, [7], 2**62, "9" * 5_000)],
)
async def test_sequence_numbers(client: Any, given: Any, kept: int | None) -> None:
    rollout = await start(client)
    await export(client, Exported().resource().span(routing(rollout, given)).body)
    [span] = await stored(client, rollout)
    assert span["sequence_id"] == (1 if kept is None else kept)


async def test_missing_numbers_are_issued_in_order(client: Any) -> None:
    rollout, other = await start(client), await start(client)
    request = Exported().resource().span(routing(rollout)).span(routing(other)).span(routing(rollout, 40))
    request.span(routing(rollout)).resource().span(routing(rollout))
    await export(client, request.body)
    numbers = {s["name"]: s["sequence_id"] for s in await stored(client, rollout)}
    assert numbers.pop("span 3") == 40
    issued = [numbers[name] for name in ("span 1", "span 4", "span 5")]
    assert issued == sorted(set(issued))
    assert [s["sequence_id"] for s in await stored(client, other)] == [1]
    next_number = await client.post(f"{V1}/spans/next", json={"rollout_id": rollout["rollout_id"], "attempt_id": "any"})
    assert next_number.json()["sequence_id"] > max(40, *issued)


async def test_spans_without_routing_ids_are_skipped(client: Any) -> None:
    rollout = await start(client)
    request = Exported().resource().span({}).span({ROLLOUT: rollout["rollout_id"]}).span(routing(rollout))
    assert await export(client, request.body) == ExportTraceServiceResponse()
    assert [s["name"] for s in await stored(client, rollout)] == ["span 3"]


async def test_unknown_ids_cost_only_themselves(client: Any) -> None:
    rollout = await start(client)
    request = Exported().resource()
    request.span({ROLLOUT: "nope", ATTEMPT: "a"}).span(routing(rollout))
    request.span(routing(rollout) | {ATTEMPT: "nope"}).span({ROLLOUT: "x" * 600, ATTEMPT: "a"})
    request.span({ROLLOUT: "\x00", ATTEMPT: "a"}).span(routing(rollout), span_id=b"x" * 300).span(routing(rollout))
    response = await export(client, request.body)
    assert response.partial_success.rejected_spans == 5
    assert "nope" in response.partial_success.error_message
    assert [s["name"] for s in await stored(client, rollout)] == ["span 2", "span 7"]


async def test_the_message_is_bounded(client: Any) -> None:
    request = Exported().resource()
    for number in range(1_000):
        request.span({ROLLOUT: f"{number:0500}", ATTEMPT: "a"})
    response = await export(client, request.body)
    assert response.partial_success.rejected_spans == 1_000
    assert len(response.partial_success.error_message) < 10_000


async def test_duplicates_are_dropped_silently(client: Any) -> None:
    rollout = await start(client)
    body = Exported().resource().span(routing(rollout)).body
    for _ in range(2):
        assert await export(client, body) == ExportTraceServiceResponse()
    assert len(await stored(client, rollout)) == 1


async def test_spans_are_heartbeats(client: Any) -> None:
    rollout = await start(client)
    await export(client, Exported().resource().span(routing(rollout)).body)
    found = (await client.get(f"{V1}/rollouts/{rollout['rollout_id']}")).json()
    assert (found["status"], found["attempt"]["status"]) == ("running", "running")
    assert found["attempt"]["last_heartbeat_time"] is not None


async def test_an_empty_export(client: Any) -> None:
    assert await export(client, b"") == ExportTraceServiceResponse()
    for body in (gzip.compress(b""), b""):
        assert await export(client, body, headers=GZIP) == ExportTraceServiceResponse()


@pytest.mark.parametrize("content_type", ["application/json", "application/protobuf", "text/plain", ""])
async def test_other_content_types(client: Any, content_type: str) -> None:
    status = await export(client, b"", 400, {"content-type": content_type})
    assert status.code == 3
    assert status.message


async def test_content_type_parameters(client: Any) -> None:
    await export(client, b"", headers={"content-type": "Application/X-Protobuf ; charset=utf-8"})


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"\xff\xff\xff garbage", ""),
        (b"not gzip", "gzip"),
        (gzip.compress(b"")[:-3], "gzip"),
        (gzip.compress(b"x" * 100)[:20], "gzip"),
        (gzip.compress(b"") + b"more", "gzip"),
        (gzip.compress(b"\xff\xff\xff garbage"), "GZIP"),
        (zlib.compress(b""), "deflate"),
        (b"", "br"),
    ],
    ids=["garbage", "not gzip", "no trailer", "truncated", "more behind", "garbage inside", "deflate", "brotli"],
)
async def test_undecodable_bodies(client: Any, body: bytes, encoding: str) -> None:
    headers = {"content-encoding": encoding} if encoding else {}
    assert (await export(client, body, 400, headers)).code == 3


async def test_gzip_both_ways(client: Any) -> None:
    rollout = await start(client)
    first, second = (Exported().resource().span(routing(rollout, n), span_id=bytes([n])).body for n in (1, 2))
    # Several members, and zeros between and after them, are one file.
    body = gzip.compress(first) + b"\x00\x00" + gzip.compress(second) + b"\x00"
    answer = await client.post(
        "/v1/traces",
        content=body,
        headers={"content-type": PROTOBUF, "content-encoding": "gzip", "accept-encoding": "br, gzip;q=0.5"},
    )
    assert (answer.status_code, answer.headers["content-encoding"], answer.content) == (200, "gzip", b"")
    assert [s["sequence_id"] for s in await stored(client, rollout)] == [1, 2]
    answer = await client.post("/v1/traces", content=b"", headers={"content-type": "x", "accept-encoding": "gzip"})
    assert (answer.status_code, answer.headers["content-encoding"]) == (400, "gzip")
    assert Status.FromString(answer.content).code == 3


async def test_decompression_is_bounded(serve: Any) -> None:
    client = await serve(body_limit=10_000)
    for bomb in (gzip.compress(b"\x00" * 5_000_000), gzip.compress(b"x" * 6_000) * 2):
        assert len(bomb) < 10_000
        assert (await export(client, bomb, 413, GZIP)).code == 8
    assert (await export(client, b"x" * 10_001, 413)).code == 8


def test_decompress_restores_everything() -> None:
    content = bytes(range(256)) * 20_000
    assert decompress(gzip.compress(content), len(content)) == content
    assert decompress(b"", 1) == b""


async def test_failures_are_told_in_protobuf(serve: Any) -> None:
    class Failing:
        recorder = None
        rows = None
        error: Exception = DatabaseUnavailableError("secret")

        async def import_spans(self, *arguments: Any, **options: Any) -> Any:
            raise self.error

        async def release_waiters(self) -> None:
            pass

    failing = Failing()
    client = await serve(store=failing)
    body = Exported().resource().span({ROLLOUT: "r", ATTEMPT: "a"}).body
    status = await export(client, body, 503)
    assert (status.code, "secret" in status.message) == (14, False)
    failing.error = RuntimeError("secret")
    status = await export(client, body, 500)
    assert (status.code, "secret" in status.message) == (13, False)


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/logs", "/v1/development/profiles"])
async def test_other_signals(client: Any, path: str) -> None:
    answer = await client.post(path, content=b"", headers={"content-type": PROTOBUF})
    assert (answer.status_code, answer.content) == (501, b"")
    assert "content-type" not in answer.headers


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("gzip", True),
        ("GZip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip;q=0.001", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("", False),
        ("identity", False),
        ("notgzip", False),
    ],
)
def test_accept_encoding(header: str, wanted: bool) -> None:
    assert gzip_wanted(header.encode()) is wanted
