"""What is larger or deeper than is accepted is refused on every route, and nothing of it is stored."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightning_sql.jsonable import NESTING_LIMIT
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import make_span
from tests.backends import POSTGRES, SQLITE, NewStore

V1 = "/v1/agl"
LIMIT = 20_000
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
KINDS = pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])


async def started(store: LightningStore) -> tuple[str, str]:
    rollout = await store.start_rollout("before", worker_id="w")
    await store.update_resources("r", {})
    return rollout.rollout_id, rollout.attempt.attempt_id


async def contents(store: LightningStore) -> Any:
    """Everything that is stored, but for the time since the start."""
    counts = {name: count for name, count in (await store.statistics()).items() if name.startswith("total_")}
    rollouts, workers = await store.query_rollouts(), await store.query_workers()
    spans = [list(await store.query_spans(rollout.rollout_id)) for rollout in rollouts]
    return counts, list(rollouts), spans, list(workers), list(await store.query_resources())


def exported(key: tuple[str, str], text: str) -> bytes:
    named = dict(zip(("rollout_id", "attempt_id"), key, strict=True))
    pairs = [{"key": f"agentlightning.{name}", "value": {"string_value": value}} for name, value in named.items()]
    span: Any = {"span_id": b"s", "name": text, "attributes": pairs}
    request: Any = [{"scope_spans": [{"spans": [span]}]}]
    return ExportTraceServiceRequest(resource_spans=request).SerializeToString()


def requests_with(key: tuple[str, str], text: str) -> dict[str, tuple[str, str, bytes]]:
    """The path, content type and body of a request of every kind that stores a text, by the kind of its route."""
    rollout = f"{V1}/rollouts/{key[0]}"
    span = make_span(*key, "s", attributes={"text": text}).model_dump()
    llm = {"resource_type": "llm", "endpoint": text, "model": "m"}
    documents: dict[str, tuple[str, Any]] = {
        "enqueue": (f"{V1}/queues/rollouts/enqueue", {"rollouts": [{"input": text}]}),
        "enqueue by records": (f"{V1}/queues/rollouts/enqueue", {"rollouts": [{"input": text}], "more": 1}),
        "start": (f"{V1}/rollouts", {"input": text}),
        "rollout": (rollout, {"input": text}),
        "attempt": (f"{rollout}/attempts/{key[1]}", {"metadata": {"text": text}}),
        "worker": (f"{V1}/workers/w", {"heartbeat_stats": {"text": text}}),
        "resources": (f"{V1}/resources", {"x": llm}),
        "resources by id": (f"{V1}/resources/r", {"x": llm}),
        "span": (f"{V1}/spans", span),
        "span by records": (f"{V1}/spans", span | {"more": 1}),
        "spans": ("/v1/lightning/spans", {"spans": [span]}),
    }
    found = {name: (path, JSON, json.dumps(document).encode()) for name, (path, document) in documents.items()}
    found["spans in lines"] = ("/v1/lightning/spans", "application/x-ndjson", json.dumps(span).encode())
    found["export"] = ("/v1/traces", PROTOBUF, exported(key, text))
    return found


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


NAMES = sorted(requests_with(("r", "a"), ""))


@KINDS
@pytest.mark.parametrize("name", NAMES)
async def test_a_body_over_the_limit_is_refused_and_nothing_is_stored(
    name: str, kind: str, new_store: NewStore, serve: Any
) -> None:
    async with new_store(kind, scan_debounce_seconds=10.0) as store:
        client = await serve(store=store, body_limit=LIMIT)
        key = await started(store)
        before = await contents(store)
        empty = len(requests_with(key, "")[name][2])
        path, content_type, body = requests_with(key, "x" * (LIMIT - empty + 1))[name]
        assert len(body) > LIMIT
        headers = {"content-type": content_type}
        for content in (body, in_pieces(body)):
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code == 413
        if content_type == PROTOBUF:
            answer = await client.post(
                path, content=gzip.compress(body), headers=headers | {"content-encoding": "gzip"}
            )
            assert answer.status_code == 413
        assert await contents(store) == before
        # As large as it may be, it is stored.
        path, _, body = requests_with(key, "x" * (LIMIT - empty - 20))[name]
        answer = await client.post(path, content=in_pieces(body), headers=headers)
        assert answer.status_code in (200, 201)
        assert await contents(store) != before


def nested(depth: int) -> Any:
    # An escape has to be undone wherever it stands.
    value: Any = "\x00"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def requests_nested(key: tuple[str, str], depth: int) -> dict[str, tuple[str, Any]]:
    """A request for every place that a payload may stand in, with one nested so deep; objects count as a level."""
    rollout = f"{V1}/rollouts/{key[0]}"
    deep, document = nested(depth), {"a": nested(depth - 1)}
    span = make_span(*key, "s").model_dump()
    llm = {"resource_type": "llm", "endpoint": "", "model": "", "sampling_parameters": document}
    context = {"trace_id": "", "span_id": "", "is_remote": False, "trace_state": {}}
    return {
        "enqueue": (f"{V1}/queues/rollouts/enqueue", {"rollouts": [{"input": deep}]}),
        "enqueue metadata": (f"{V1}/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "metadata": document}]}),
        "start": (f"{V1}/rollouts", {"input": deep}),
        "start metadata": (f"{V1}/rollouts", {"input": 1, "metadata": document}),
        "rollout": (rollout, {"input": deep}),
        "rollout metadata": (rollout, {"metadata": document}),
        "attempt": (f"{rollout}/attempts/{key[1]}", {"metadata": document}),
        "worker": (f"{V1}/workers/w", {"heartbeat_stats": document}),
        "resources": (f"{V1}/resources", {"x": llm}),
        "resources by id": (f"{V1}/resources/r", {"x": llm}),
        "span": (f"{V1}/spans", span | {"more": deep}),
        "status": (f"{V1}/spans", span | {"status": {"status_code": "OK", "more": deep}}),
        "context": (f"{V1}/spans", span | {"context": context | {"more": deep}}),
        "link": (f"{V1}/spans", span | {"links": [{"context": context, "more": deep}]}),
        "context of a link": (f"{V1}/spans", span | {"links": [{"context": context | {"more": deep}}]}),
        "event": (f"{V1}/spans", span | {"events": [{"name": "", "attributes": {}, "more": deep}]}),
    }


@KINDS
@pytest.mark.parametrize("name", sorted(requests_nested(("r", "a"), 2)))
async def test_nesting_ends_at_its_limit(name: str, kind: str, new_store: NewStore, serve: Any) -> None:
    async with new_store(kind, scan_debounce_seconds=10.0) as store:
        client = await serve(store=store)
        key = await started(store)
        before = await contents(store)
        for depth in (NESTING_LIMIT + 1, NESTING_LIMIT + 2, NESTING_LIMIT + 3, NESTING_LIMIT + 10, 20_000):
            path, shape = requests_nested(key, 2)[name]
            text = (
                json.dumps(shape)
                .replace(json.dumps(nested(2)), deep_text(depth))
                .replace(json.dumps({"a": nested(1)}), deep_text(depth))
            )
            answer = await client.post(path, content=text.encode(), headers={"content-type": JSON})
            assert answer.status_code == 422, (depth, answer.content)
        assert await contents(store) == before
        path, document = requests_nested(key, NESTING_LIMIT)[name]
        assert (await client.post(path, json=document)).status_code in (200, 201)
        assert await contents(store) != before


def deep_text(depth: int) -> str:
    """An object nested so deep."""
    return '{"a":' * depth + "1" + "}" * depth


@KINDS
async def test_a_name_of_an_unknown_member_is_text(kind: str, new_store: NewStore, serve: Any) -> None:
    """Names of members that no record has may be anything but a lone surrogate; their values may hold those, too."""
    async with new_store(kind, scan_debounce_seconds=10.0) as store:
        client = await serve(store=store)
        key = await started(store)
        span = make_span(*key, "s").model_dump()
        for place in (span, span["status"]):
            place["\ud800"] = 1
            answer = await client.post(f"{V1}/spans", content=json.dumps(span), headers={"content-type": JSON})
            assert answer.status_code == 422
            del place["\ud800"]
        span["more"] = {"\ud800": "\udfff"}
        answer = await client.post(f"{V1}/spans", content=json.dumps(span), headers={"content-type": JSON})
        assert json.loads(answer.content)["more"] == {"\ud800": "\udfff"}
