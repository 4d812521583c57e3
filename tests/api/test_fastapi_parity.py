"""Schema violations are told as FastAPI tells them, which is what the protocol's first server is made with."""

from typing import Any

import httpx
import pytest
from fastapi import Body, FastAPI, Query

from lightning_api import models
from lightning_sql.records import NamedResources, Span

JSON = "application/json"

ORACLE = FastAPI()


@ORACLE.post("/v1/agl/rollouts")
async def start_rollout(request: models.StartRolloutRequest) -> None: ...


@ORACLE.post("/v1/agl/queues/rollouts/enqueue")
async def enqueue(request: models.EnqueueRequest) -> None: ...


@ORACLE.post("/v1/agl/queues/rollouts/dequeue")
async def dequeue(request: models.DequeueRequest | None = Body(None)) -> None: ...


@ORACLE.post("/v1/agl/resources")
async def add_resources(request: NamedResources) -> None: ...


@ORACLE.post("/v1/agl/spans")
async def add_span(span: Span) -> None: ...


@ORACLE.get("/v1/agl/rollouts")
async def query_rollouts(
    status_in: list[models.RolloutStatus] | None = Query(None),
    sort_order: models.SortOrder = "asc",
    filter_logic: models.FilterLogic = "and",
    limit: int = -1,
) -> None: ...


@ORACLE.get("/v1/agl/spans")
async def query_spans(rollout_id: str, limit: int = -1, sort_order: models.SortOrder = "asc") -> None: ...


BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"1",
    b'"text"',
    b"{",
    b"nonsense",
    b'{"input": 1, "mode": "bogus"}',
    b'{"input": 1, "mode": 7, "config": {"max_attempts": "x", "retry_condition": ["sad", "timeout", 3]}}',
    b'{"input": 1, "config": []}',
    b'{"input": 1, "metadata": {"a": 1}, "worker_id": 5}',
    b'{"input": 1, "metadata": "x", "resources_id": {}}',
    b'{"rollouts": {}}',
    b'{"rollouts": [{"mode": "train"}, 3, null, {"input": 1, "config": {"timeout_seconds": "soon"}}]}',
    b'{"limit": "many", "worker_id": false}',
    b'{"limit": 1.5}',
    b'{"x": {"resource_type": "gpu"}, "y": {"endpoint": "e"}, "z": {"resource_type": "llm", "model": 4}}',
    b'{"p": {"resource_type": "prompt_template", "template": "t", "engine": "mako"}}',
    b'{"rollout_id": 1, "attributes": {"a": null, "b": {"c": 1}, "d": [1, "x"]}, "status": {"status_code": "MAYBE"}}',
    b'{"events": [{"name": "e"}, 1], "links": [{}], "context": {"trace_id": "t"}, "resource": null}',
]
CONTENT_TYPES = [JSON, "text/plain", "application/x+json; a=b", None]
POSTS = [
    "/v1/agl/rollouts",
    "/v1/agl/queues/rollouts/enqueue",
    "/v1/agl/queues/rollouts/dequeue",
    "/v1/agl/resources",
    "/v1/agl/spans",
]
QUERIES = [
    "/v1/agl/rollouts?status_in=bogus&status_in=failed&status_in=",
    "/v1/agl/rollouts?limit=abc&sort_order=up&filter_logic=xor",
    "/v1/agl/rollouts?limit=&sort_order=",
    "/v1/agl/rollouts?limit=1.5",
    "/v1/agl/rollouts?limit=1&limit=x",
    "/v1/agl/spans",
    "/v1/agl/spans?limit=x&sort_order=asc",
]


def violations(answer: Any) -> Any:
    if answer.status_code != 422:
        return answer.status_code < 400 or answer.status_code
    return {(error["type"], tuple(error["loc"]), error["msg"]) for error in answer.json()["detail"]}


@pytest.mark.parametrize("path", POSTS)
async def test_bodies(client: Any, path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(ORACLE), base_url="http://oracle") as oracle:
        for body in BODIES:
            for content_type in CONTENT_TYPES:
                headers = {} if content_type is None else {"content-type": content_type}
                ours = await client.post(path, content=body, headers=headers)
                theirs = await oracle.post(path, content=body, headers=headers)
                assert (body, content_type, violations(ours)) == (body, content_type, violations(theirs))


async def test_query_parameters(client: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(ORACLE), base_url="http://oracle") as oracle:
        for query in QUERIES:
            ours, theirs = await client.get(query), await oracle.get(query)
            assert (query, violations(ours)) == (query, violations(theirs))
            assert theirs.status_code == 422
