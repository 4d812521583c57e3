"""Idempotency keys over HTTP: which routes take them, what is a repeat, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightning_api.routes import OPERATIONS, bulk
from lightning_sql.testing.samples import make_span
from tests.backends import POSTGRES, SQLITE, NewStore

ENQUEUE = "/v1/agl/queues/rollouts/enqueue"
DEQUEUE = "/v1/agl/queues/rollouts/dequeue"
SPANS = "/v1/lightning/spans"
LEAN = {"rollouts": [{"input": {"a": 1}}]}
ODD = {"rollouts": [{"input": {"a": 1}, "config": {"max_attempts": "2"}}]}
"""A body that goes the way over the records."""


@pytest.fixture(params=["memory", SQLITE, POSTGRES])
async def post(serve: Any, new_store: NewStore, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Posts to a service on a store of each kind."""
    async with new_store(request.param) as store:
        client = await serve(store=store)

        async def send(path: str, content: Any, key: str | bytes | None) -> Any:
            headers: dict[str, Any] = {"content-type": "application/json"}
            if key is not None:
                headers["idempotency-key"] = key
            return await client.post(path, content=json.dumps(content).encode(), headers=headers)

        yield send


def test_what_creates_or_claims_takes_a_key() -> None:
    assert {declared.name for declared in OPERATIONS if declared.keyed} == {
        "enqueue_rollouts",
        "dequeue_rollouts",
        "start_rollout",
        "update_rollout",
        "start_attempt",
        "add_resources",
        "update_resources",
        "add_spans",
    }


@pytest.mark.parametrize("body", [LEAN, ODD])
async def test_a_repeat(post: Any, body: Any) -> None:
    first, second, other = [await post(ENQUEUE, body, key) for key in ("k", "k", "another key")]
    assert first.status_code == second.status_code == 201
    assert first.content == second.content != other.content
    claimed, again = [await post(DEQUEUE, {"limit": 5, "worker_id": "w"}, "claim") for _ in range(2)]
    assert [len(answer.json()) for answer in (claimed, again)] == [2, 2]
    assert claimed.content == again.content


@pytest.mark.parametrize("body", [LEAN, ODD])
async def test_another_body_or_route_under_the_same_key(post: Any, body: Any) -> None:
    await post(ENQUEUE, body, "k")
    for path, content in (
        (ENQUEUE, {"rollouts": [{"input": 2}]}),
        (ENQUEUE, {"rollouts": [{"input": 2, "config": {"max_attempts": "2"}}]}),
        (DEQUEUE, {"limit": 1}),
        ("/v1/agl/rollouts", {"input": 1}),
        ("/v1/agl/resources", {}),
        ("/v1/agl/resources/r", {}),
        (SPANS, {"spans": [make_span("ro-1", "at-1", "s").model_dump()]}),
    ):
        answer = await post(path, content, "k")
        assert answer.status_code == 422, path
        told = answer.json()
        [problem] = told["errors"] if path == SPANS else told["detail"]
        assert problem["type"] == "idempotency_key_reused"
        assert problem["loc"] == ["header", "idempotency-key"]
    [claimed] = (await post(DEQUEUE, {"limit": 10}, None)).json()
    assert claimed["input"] == {"a": 1}


@pytest.mark.parametrize("key", ["", " ", "ü".encode(), "x" * 513, "a\tb"])
@pytest.mark.parametrize(("path", "body"), [(ENQUEUE, LEAN), (ENQUEUE, ODD), (DEQUEUE, {}), (SPANS, {"spans": []})])
async def test_what_is_no_key(post: Any, path: str, body: Any, key: str | bytes) -> None:
    answer = await post(path, body, key)
    assert answer.status_code == 422
    assert "idempotency-key" in answer.text
    assert (await post(DEQUEUE, {}, None)).json() == []


async def test_the_longest_key(post: Any) -> None:
    key = "x" * 512
    first, second = [await post(ENQUEUE, LEAN, key) for _ in range(2)]
    assert first.content == second.content


async def test_repeats_of_many_spans(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the store in portions, each under the key; a repeat goes on where the first stopped."""
    monkeypatch.setattr(bulk, "CHUNK_SPANS", 3)
    [_] = (await post(ENQUEUE, LEAN, None)).json()
    [claimed] = (await post(DEQUEUE, {}, None)).json()
    ids = claimed["rollout_id"], claimed["attempt"]["attempt_id"]
    spans = [make_span(*ids, f"s{number % 7}", number + 1).model_dump() for number in range(8)]
    spans.append(make_span("ro-none", *ids[1:], "s", 1).model_dump())
    first = await post(SPANS, {"spans": spans}, "k")
    assert [first.json()[name] for name in ("stored", "duplicates", "rejected")] == [7, 1, 1]
    again = await asyncio.gather(*(post(SPANS, {"spans": spans}, "k") for _ in range(4)))
    assert {answer.content for answer in again} == {first.content}
    other = await post(SPANS, {"spans": spans}, "other")
    assert [other.json()[name] for name in ("stored", "duplicates", "rejected")] == [0, 8, 1]
