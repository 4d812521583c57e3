"""What a caller learns of a failure, and what not."""

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lightning_api.routes import OPERATIONS
from lightning_sql.errors import (
    DatabaseFullError,
    DatabaseUnavailableError,
    InvalidRequestError,
    RecordNotFoundError,
    TransactionConflictError,
    UnstorableValueError,
)
from lightning_sql.store.factory import open_store

ROLLOUTS = "/v1/agl/rollouts"
JSON = {"content-type": "application/json"}
SECRET = "sk-very-secret"


class FailingStore:
    """A store whose every call fails in the same way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    rows = None
    recorder = None

    async def release_waiters(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        async def fail(*arguments: Any, **options: Any) -> Any:
            raise self._error

        return fail


def span(**changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": "r",
        "attempt_id": "a",
        "sequence_id": 1,
        "trace_id": "0" * 32,
        "span_id": "0" * 16,
        "parent_id": None,
        "name": "n",
        "status": {"status_code": "OK"},
        "attributes": {},
        "events": [],
        "links": [],
        "start_time": None,
        "end_time": None,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    } | changes


CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/agl/statistics", None),
    ("POST", "/v1/agl/queues/rollouts/enqueue", {"rollouts": [{"input": 1}]}),
    ("POST", "/v1/agl/queues/rollouts/dequeue", {}),
    ("POST", ROLLOUTS, {"input": 1}),
    ("GET", ROLLOUTS, None),
    ("POST", f"{ROLLOUTS}/search", {}),
    ("GET", f"{ROLLOUTS}/r", None),
    ("POST", f"{ROLLOUTS}/r", {}),
    ("GET", f"{ROLLOUTS}/r/attempts", None),
    ("POST", f"{ROLLOUTS}/r/attempts/search", {}),
    ("POST", f"{ROLLOUTS}/r/attempts", {}),
    ("GET", f"{ROLLOUTS}/r/attempts/latest", None),
    ("POST", f"{ROLLOUTS}/r/attempts/a", {}),
    ("GET", "/v1/agl/spans?rollout_id=r", None),
    ("POST", "/v1/agl/spans/search", {"rollout_id": "r"}),
    ("POST", "/v1/agl/spans", span()),
    ("POST", "/v1/agl/spans/next", {"rollout_id": "r", "attempt_id": "a"}),
    ("GET", "/v1/agl/resources", None),
    ("POST", "/v1/agl/resources", {}),
    ("GET", "/v1/agl/resources/latest", None),
    ("GET", "/v1/agl/resources/x", None),
    ("POST", "/v1/agl/resources/x", {}),
    ("GET", "/v1/agl/workers", None),
    ("POST", "/v1/agl/workers/search", {}),
    ("GET", "/v1/agl/workers/w", None),
    ("POST", "/v1/agl/workers/w", {}),
    ("POST", "/v1/agl/waits/rollouts", {"rollout_ids": ["r"]}),
]


@pytest.mark.parametrize(
    ("error", "status", "content"),
    [
        (RecordNotFoundError("no such thing"), 404, {"detail": "no such thing", "error_type": "ValueError"}),
        (InvalidRequestError("that makes no sense"), 400, {"detail": "that makes no sense"}),
        (
            DatabaseUnavailableError(f"connection to 10.0.0.1 failed: {SECRET}"),
            503,
            {"detail": "The database is not available; try again"},
        ),
        (
            DatabaseFullError(),
            503,
            {"detail": "The database has no room left, so that nothing was stored; try again when there is room"},
        ),
        (TransactionConflictError(SECRET), 503, {"detail": "The database is not available; try again"}),
        (
            RuntimeError(f"SELECT {SECRET}"),
            500,
            {"detail": "Internal server error", "error_type": "RuntimeError"},
        ),
        (ValueError(SECRET), 500, {"detail": "Internal server error", "error_type": "ValueError"}),
    ],
)
async def test_every_route_maps_every_failure(
    serve: Any, caplog: pytest.LogCaptureFixture, error: Exception, status: int, content: Any
) -> None:
    caplog.set_level(logging.CRITICAL, "lightning_api.app")
    client = await serve(store=FailingStore(error))
    for method, path, body in CALLS:
        answer = await client.request(method, path, json=body)
        assert (path, answer.status_code, answer.json()) == (path, status, content)
        assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
        assert SECRET not in answer.text


async def test_the_log_has_the_traceback_that_the_answer_lacks(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await serve(store=FailingStore(RuntimeError("the reason")))
    answer = await client.get("/v1/agl/workers")
    assert "reason" not in answer.text
    assert "Traceback" not in answer.text
    assert "RuntimeError: the reason" in caplog.text


async def test_an_unstorable_value_is_a_schema_violation(serve: Any) -> None:
    client = await serve(store=FailingStore(UnstorableValueError("too large")))
    answer = await client.post(ROLLOUTS, json={"input": 1})
    assert answer.status_code == 422
    assert answer.json() == {"detail": [{"type": "value_error", "loc": ["body"], "msg": "too large", "input": None}]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"{ROLLOUTS}/nope", None),
        ("POST", f"{ROLLOUTS}/nope", {"status": "failed"}),
        ("POST", f"{ROLLOUTS}/nope/attempts", None),
        ("POST", f"{ROLLOUTS}/nope/attempts/a", {"status": "failed"}),
        ("POST", f"{ROLLOUTS}/nope/attempts/latest", {}),
        ("POST", "/v1/agl/spans", span()),
    ],
)
async def test_unknown_ids_are_not_found(client: Any, method: str, path: str, body: Any) -> None:
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 404
    assert answer.json().keys() == {"detail", "error_type"}
    assert answer.json()["error_type"] == "ValueError"


async def test_reads_of_unknown_ids_are_empty(client: Any) -> None:
    for path in (f"{ROLLOUTS}/nope/attempts/latest", "/v1/agl/resources/nope", "/v1/agl/workers/nope"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (200, None)
    for path in (f"{ROLLOUTS}/nope/attempts", "/v1/agl/spans?rollout_id=nope&attempt_id=latest"):
        assert (await client.get(path)).json() == {"items": [], "limit": -1, "offset": 0, "total": 0}


@pytest.mark.parametrize("bad_id", ["%00", "x" * 513, "a%00b"])
async def test_ids_that_no_record_can_have(client: Any, bad_id: str) -> None:
    for path in (f"{ROLLOUTS}/{bad_id}/attempts/latest", f"/v1/agl/resources/{bad_id}", f"/v1/agl/workers/{bad_id}"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (200, None)
    assert (await client.get(f"{ROLLOUTS}/{bad_id}/attempts")).json()["total"] == 0
    assert (await client.get(f"{ROLLOUTS}/{bad_id}")).status_code == 404
    for path in (f"{ROLLOUTS}/{bad_id}", f"{ROLLOUTS}/{bad_id}/attempts", f"{ROLLOUTS}/r/attempts/{bad_id}"):
        assert (await client.post(path, json={})).status_code == 404
    for path, name in (("/v1/agl/workers", "worker_id"), ("/v1/agl/resources", "resources_id")):
        answer = await client.post(f"{path}/{bad_id}", json={})
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["path", name]


async def test_the_page_is_checked_before_the_rollout(client: Any) -> None:
    assert (await client.get(f"{ROLLOUTS}/%00/attempts?limit=0")).status_code == 400


@pytest.mark.parametrize("worker_id", ["\x00", "x" * 513])
async def test_bodies_with_such_ids(client: Any, worker_id: str) -> None:
    for path, body in (
        ("/v1/agl/queues/rollouts/dequeue", {"worker_id": worker_id}),
        (ROLLOUTS, {"input": 1, "worker_id": worker_id}),
        (f"{ROLLOUTS}/r/attempts", {"worker_id": worker_id}),
        (f"{ROLLOUTS}/r/attempts/a", {"worker_id": worker_id}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 422
        [error] = answer.json()["detail"]
        assert (error["type"], error["loc"]) == ("value_error", ["body", "worker_id"])
        assert isinstance(error["ctx"]["error"], str)


async def test_secrets_are_not_echoed(client: Any) -> None:
    llm = {"resource_type": "llm", "endpoint": "e", "api_key": SECRET}
    bodies = [
        {"x": llm},
        {"x": {"api_key": SECRET}},
        {"x": {"resource_type": "gpu", "API-Key": SECRET, "more": {"password": SECRET, "Authorization": SECRET}}},
        {"x": llm | {"model": "m", "api_key": [SECRET]}},
        {"x": llm | {"model": "m", "api_key": {"value": SECRET}}},
        [{"x": llm}],
    ]
    for body in bodies:
        answer = await client.post("/v1/agl/resources", json=body)
        assert answer.status_code == 422
        assert SECRET not in answer.text
    for content_type in ("text/plain", "application/json"):
        content = (json.dumps({"x": llm}) + "!").encode()
        answer = await client.post("/v1/agl/resources", content=content, headers={"content-type": content_type})
        assert answer.status_code == 422
        assert SECRET not in answer.text


HIDING_PLACES: list[Any] = [
    SECRET,
    [SECRET],
    [[SECRET]],
    {"api_key": SECRET},
    {"headers": {"x-key": SECRET}, "url": f"https://user:{SECRET}@host/"},
    {"a": [{"b": SECRET}]},
    {"resource_type": "llm", "endpoint": SECRET},
    {"resource_type": SECRET},
    {"resource_type": "llm", "endpoint": 1, "model": [SECRET], "sampling_parameters": SECRET},
    {"resource_type": "prompt_template", "template": [SECRET], "engine": 1},
    7,
]


def hiding(place: Any) -> Iterator[Any]:
    """Bodies that have something where another thing belongs."""
    yield place
    yield {"main": place}
    yield {"resources": place}
    yield {"input": place, "metadata": place, "config": place, "mode": [place], "resources_id": [place]}
    yield {"input": place, "config": {"retry_condition": place, "max_attempts": place, "timeout_seconds": place}}
    yield {"rollouts": place}
    yield {"rollouts": [place, {"input": place, "worker_id": [place], "metadata": place}]}
    yield {"worker_id": [place], "limit": place, "status": [place], "heartbeat_stats": place, "metadata": place}
    yield {"rollout_id": [place], "sort_by": [place], "status_in": place, "rollout_ids": place, "timeout": place}
    yield span(attributes={"key": place}, resource=place, events=[place], links=[place], context=place, name=[place])
    yield span(attributes=place, status=place, start_time=[place], sequence_id=[place])
    yield {"spans": place}
    yield {"spans": [place, span(attributes=place), span(attributes={"a": {"b": place}})]}


POSTS = [operation.path for operation in OPERATIONS if operation.method == "POST"]


@pytest.fixture(params=["memory", "rows"])
async def either(request: pytest.FixtureRequest, serve: Any, sqlite_url: str) -> AsyncIterator[Any]:
    """A client of a store with rows, and so with lean routes, or of one without."""
    url = "memory://" if request.param == "memory" else sqlite_url
    async with await open_store(url) as opened:
        yield await serve(store=opened)


@pytest.mark.parametrize("path", POSTS)
async def test_no_value_of_a_body_is_echoed(either: Any, caplog: pytest.LogCaptureFixture, path: str) -> None:
    """A key can be in any text of a body, under any name; so none is repeated, in an answer or in the log."""
    caplog.set_level(logging.DEBUG)
    path = re.sub(r"{\w+}", "x", path)
    refused = 0
    for place in HIDING_PLACES:
        for body in hiding(place):
            text = json.dumps(body).encode()
            types = ("application/json", "application/x-ndjson", "text/plain")
            broken = [(text[:-1], types[0]), (text + b"\xff", types[0])]
            for content, content_type in [*((text, content_type) for content_type in types), *broken]:
                answer = await either.post(path, content=content, headers={"content-type": content_type})
                refused += answer.status_code >= 400 or "rejected" in answer.text
                if answer.status_code < 300 and "results" not in answer.text:
                    continue  # what was stored is answered
                assert SECRET not in answer.text, (body, content_type)
    assert refused or path.endswith(("attempts", "/profiles")), "nothing was refused"
    assert SECRET not in caplog.text


async def test_words_and_parameters_are_echoed(client: Any) -> None:
    """What is wrong should be found without guessing."""
    answer = await client.post(ROLLOUTS, json={"input": 1, "mode": "trian", "config": {"retry_condition": ["fialed"]}})
    told = {error["loc"][-1]: error["input"] for error in answer.json()["detail"]}
    assert told == {"mode": "trian", 0: "fialed"}
    answer = await client.get(f"{ROLLOUTS}?limit=many&status_in=bogus")
    assert [error["input"] for error in answer.json()["detail"]] == ["many", "bogus"]
    answer = await client.post("/v1/agl/resources", json={"main": {"resource_type": "lllm"}})
    [error] = answer.json()["detail"]
    assert error["ctx"]["tag"] == "lllm"
    assert "'lllm'" in error["msg"]
    answer = await client.post(ROLLOUTS, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.json()["detail"][0]["input"] == "(a body that is not declared as JSON)"


async def test_what_is_echoed_is_bounded(client: Any) -> None:
    long = "x" * 100_000
    deep: Any = "end"
    for _ in range(400):
        deep = {"deeper": [deep]}
    bodies: list[Any] = [
        {"mode": long},
        {"metadata": long},
        {"metadata": [long] * 100},
        {"metadata": [10**4000] * 1_000},
        {"config": {"max_attempts": 10**4000}},
        [deep] * 100,
        {"config": deep, "mode": deep},
        {"rollouts": [long] * 100},
    ]
    for body in bodies:
        path = "/v1/agl/queues/rollouts/enqueue" if "rollouts" in body else ROLLOUTS
        answer = await client.post(path, json=body)
        assert answer.status_code == 422
        assert len(answer.content) < 100_000
    answer = await client.post("/v1/agl/resources", json={long: {"resource_type": long}})
    assert answer.status_code == 422
    assert len(answer.content) < 100_000


async def test_errors_with_odd_input_are_valid_json(client: Any) -> None:
    answer = await client.post(
        ROLLOUTS, content=b'{"mode": "\\ud800", "metadata": [NaN, 1e999], "config": NaN}', headers=JSON
    )
    assert answer.status_code == 422
    details = {error["loc"][-1]: error for error in json.loads(answer.content)["detail"]}
    assert details["mode"]["input"] == "…"
    assert details["metadata"]["input"] == [None, None]
    assert details["config"]["input"] is None
