"""The short way of the hot routes answers what the way over the records answers, and exactly what was sent."""

import asyncio
import json
import math
import re
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_api.app import create_app, service_of
from lightning_api.settings import Settings
from lightning_sql.errors import DatabaseUnavailableError, OverloadedError
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import ODD_PAYLOADS, assert_same
from tests.api.bodies import ROLLOUT, SPAN, UPDATE, bodies
from tests.api.fakes import StoreOfRows
from tests.backends import START, Clock, NewStore

pytestmark = pytest.mark.slow

V1 = "/v1/agl"
JSON = {"content-type": "application/json"}
EXACT = {"accept": "application/json; floats=exact"}
ENQUEUE, DEQUEUE = f"{V1}/queues/rollouts/enqueue", f"{V1}/queues/rollouts/dequeue"

# `ROLLOUT` and `ATTEMPT` stand for the ids of an attempt that each side made beforehand.
KNOWN_SPAN = SPAN | {"rollout_id": "ROLLOUT", "attempt_id": "ATTEMPT"}
ATTEMPTS = f"{V1}/rollouts/ROLLOUT/attempts"
PAGE = {"sort_by": "start_time", "sort_order": "desc", "limit": 2, "offset": 0}

calls = st.one_of(
    st.tuples(st.just(ENQUEUE), bodies({"rollouts": [ROLLOUT, {"input": 1}]})),
    st.tuples(st.just(DEQUEUE), bodies({"limit": 1, "worker_id": "w"}) | st.just(b"")),
    st.tuples(st.just(f"{V1}/spans"), bodies(KNOWN_SPAN)),
    st.tuples(st.just(f"{V1}/spans"), bodies(SPAN)),
    st.tuples(st.just(f"{V1}/spans/next"), bodies({"rollout_id": "ROLLOUT", "attempt_id": "ATTEMPT"})),
    st.tuples(
        st.sampled_from([f"{ATTEMPTS}/ATTEMPT", f"{ATTEMPTS}/latest", f"{ATTEMPTS}/nope", f"{ATTEMPTS}/%00"]),
        bodies(UPDATE),
    ),
    st.tuples(
        st.sampled_from([f"{V1}/workers/w", f"{V1}/workers/%1Aw", f"{V1}/workers/{'x' * 300}", f"{V1}/workers/%00"]),
        bodies({"heartbeat_stats": {"cpu": 0.5}}) | st.just(b""),
    ),
    st.tuples(st.just(f"{V1}/rollouts/search"), bodies({"status_in": ["queuing", "preparing"]} | PAGE)),
    st.tuples(st.just(f"{V1}/spans/search"), bodies({"rollout_id": "ROLLOUT", "name": "n"} | PAGE)),
    st.tuples(st.just(f"{V1}/waits/rollouts"), bodies({"rollout_ids": ["x", "x"], "timeout": 0})),
    st.tuples(st.sampled_from([f"{V1}/rollouts/ROLLOUT", f"{V1}/rollouts/nope", f"{V1}/rollouts?limit=3"]), st.none()),
)


class Side:
    """A service, the store that it is on for now, and the attempt that its callers know of."""

    def __init__(self) -> None:
        self.app = create_app(Settings(database_url="memory://"), cast(Any, StoreOfRows(None)))
        transport = httpx.ASGITransport(cast(Any, self.app))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://service")

    async def use(self, store: LightningStore) -> None:
        service_of(self.app).current_store = store
        rollout = await store.start_rollout({"for": "spans"}, worker_id="w")
        self.known = {"ROLLOUT": rollout.rollout_id, "ATTEMPT": rollout.attempt.attempt_id}

    async def call(self, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str, str]:
        for name, identifier in self.known.items():
            path = path.replace(name, identifier)
            body = None if body is None else body.replace(name.encode(), identifier.encode())
        method = "GET" if body is None else "POST"
        answer = await self.client.request(method, path, content=body, headers=headers)
        return answer.status_code, answer.headers["content-type"], self.comparable(answer)

    def comparable(self, answer: httpx.Response) -> str:
        """What was answered, without what is different every time."""
        content = json.loads(answer.content)
        if answer.status_code == 404:
            content["detail"] = "not found"
        text = json.dumps(content, sort_keys=True)
        return re.sub(r"at-[0-9a-f]{8}", "at", re.sub(r"ro-[0-9a-f]{12}", "ro", text))


async def compare(
    sides: tuple[Side, Side],
    stores: tuple[LightningStore, LightningStore],
    batch: list[tuple[str, bytes | None]],
    headers: dict[str, str],
) -> None:
    try:
        for side, store in zip(sides, stores, strict=True):
            await side.use(store)
        for path, body in batch:
            mine, other = [await side.call(path, body, headers) for side in sides]
            assert mine == other, (path, body)
    finally:
        for store in stores:
            await store.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(calls, min_size=8, max_size=20), exact=st.booleans())
def test_every_body_is_answered_as_over_the_records(
    new_store: NewStore, clock: Clock, sides: tuple[Side, Side], batch: list[tuple[str, bytes | None]], exact: bool
) -> None:
    clock.now = START + 0.25
    stores = new_store("sqlite"), new_store("memory")
    asyncio.run(compare(sides, stores, batch, JSON | (EXACT if exact else {})))


@pytest.fixture
def sides() -> tuple[Side, Side]:
    return Side(), Side()


@pytest.fixture
async def rows_client(new_store: NewStore, serve: Any) -> Any:
    """A client of a service on a store with rows."""
    store = new_store("sqlite", real_time=True)
    yield await serve(store=store)
    await store.close()


async def started(client: Any) -> dict[str, Any]:
    return (await client.post(f"{V1}/rollouts", json={"input": 1, "worker_id": "w"})).json()


def span_of(rollout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {"rollout_id": rollout["rollout_id"], "attempt_id": rollout["attempt"]["attempt_id"]}
    return SPAN | known | changes


async def post(client: Any, path: str, content: Any) -> Any:
    """Send what Python's own encoder writes, and read it in the same way."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = await client.post(path, content=body, headers=JSON | EXACT)
    assert answer.status_code in (200, 201), answer.text
    return json.loads(answer.content)


@pytest.mark.parametrize("name", ODD_PAYLOADS)
async def test_what_goes_in_comes_out(rows_client: Any, name: str) -> None:
    payload = ODD_PAYLOADS[name]
    [queued] = await post(rows_client, ENQUEUE, {"rollouts": [{"input": payload, "metadata": {"value": payload}}]})
    [claimed] = await post(rows_client, DEQUEUE, {})
    path = f"{V1}/rollouts/{claimed['rollout_id']}"
    found = json.loads((await rows_client.get(path, headers=EXACT)).content)
    page = await post(rows_client, f"{V1}/rollouts/search", {"rollout_id_in": [claimed["rollout_id"]]})
    await post(rows_client, path, {"status": "failed"})
    [finished] = await post(rows_client, f"{V1}/waits/rollouts", {"rollout_ids": [claimed["rollout_id"]]})
    for rollout in (queued, claimed, found, page["items"][0], finished):
        assert_same(rollout["input"], payload)
        assert_same(rollout["metadata"], {"value": payload})
    attempt = await post(rows_client, f"{path}/attempts/latest", {"metadata": {"value": payload}})
    assert_same(attempt["metadata"], {"value": payload})
    worker = await post(rows_client, f"{V1}/workers/w", {"heartbeat_stats": {"value": payload}})
    assert_same(worker["heartbeat_stats"], {"value": payload})


@pytest.mark.parametrize(
    "attribute",
    [
        "\x00",
        "\ud800",
        "\x1a",
        "\x1aNaN",
        "😀\\u0000",
        math.nan,
        -math.inf,
        2**63,
        10**40,
        5e-324,
        -0.0,
        [math.nan, 1.0],
    ],
)
async def test_what_goes_into_a_span_comes_out(rows_client: Any, attribute: Any) -> None:
    rollout = await started(rows_client)
    span = span_of(rollout, attributes={"b": attribute, "a": 1, "": True}, end_time=math.inf)
    if isinstance(attribute, str):
        span |= {"name": attribute, "extra": {"b": attribute, "a": [attribute]}}
    stored = await post(rows_client, f"{V1}/spans", span)
    page = await post(rows_client, f"{V1}/spans/search", {"rollout_id": rollout["rollout_id"]})
    assert_same(stored, span)
    assert_same(page["items"], [span])
    plain = await rows_client.get(f"{V1}/spans?rollout_id={rollout['rollout_id']}")

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    [read] = json.loads(plain.content, parse_constant=refuse)["items"]
    assert read["end_time"] is None
    if not isinstance(attribute, float) or math.isfinite(attribute):
        assert json.dumps(read["name"]) == json.dumps(span["name"])


async def test_a_large_text_comes_back(rows_client: Any) -> None:
    text = "xé\n😀" * 1_500_000
    for ascii_only in (True, False):
        body = json.dumps({"rollouts": [{"input": text}]}, ensure_ascii=ascii_only).encode()
        [rollout] = await post(rows_client, ENQUEUE, body)
        assert rollout["input"] == text
        found = await rows_client.get(f"{V1}/rollouts/{rollout['rollout_id']}")
        assert found.json()["input"] == text


async def test_bytes_pass_through(rows_client: Any) -> None:
    text = b'{ "b":1.50,\t"a" : [1E5, -0.0, 123456789012345678901234567890, "\\/\\u00e9\xc3\xa9"] }'
    body = b'{"rollouts": [{"input": %b}]}' % text
    answer = await rows_client.post(ENQUEUE, content=body, headers=JSON)
    assert text in answer.content
    found = await rows_client.get(f"{V1}/rollouts/{answer.json()[0]['rollout_id']}")
    assert text in found.content
    assert int(found.headers["content-length"]) == len(found.content)


async def test_a_span_is_stored_once(rows_client: Any) -> None:
    rollout = await started(rows_client)
    first = await rows_client.post(f"{V1}/spans", json=span_of(rollout))
    again = await rows_client.post(f"{V1}/spans", json=span_of(rollout, name="other"))
    assert (first.status_code, first.json()["name"]) == (201, "n")
    assert (again.status_code, again.json()) == (201, None)
    number = await rows_client.post(
        f"{V1}/spans/next", json={"rollout_id": rollout["rollout_id"], "attempt_id": "whichever"}
    )
    assert number.json() == {"sequence_id": 2}


async def test_other_content_types_are_opaque_here_too(rows_client: Any) -> None:
    rollout = await started(rows_client)
    attempt = f"{V1}/rollouts/{rollout['rollout_id']}/attempts/latest"
    for path, body in (
        (ENQUEUE, b'{"rollouts": [{"input": 1}]}'),
        (DEQUEUE, b"{}"),
        (f"{V1}/spans", json.dumps(span_of(rollout)).encode()),
        (f"{V1}/spans/next", b'{"rollout_id": "r", "attempt_id": "a"}'),
        (attempt, b"{}"),
        (f"{V1}/workers/w", b"{}"),
    ):
        answer = await rows_client.post(path, content=body, headers={"content-type": "text/plain"})
        assert (path, answer.status_code) == (path, 422)
        assert answer.json()["detail"][0]["loc"] == ["body"]
    for path in (ENQUEUE, f"{V1}/spans", f"{V1}/spans/next", attempt):
        assert (await rows_client.post(path, headers=JSON)).json()["detail"][0]["type"] == "missing"


class FailingRows:
    """Rows whose every operation fails in the same way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def fail(*arguments: Any, **options: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize("error", [OverloadedError(), DatabaseUnavailableError("10.0.0.1 is gone")])
async def test_what_is_not_available_may_be_asked_again(serve: Any, error: Exception) -> None:
    client = await serve(store=StoreOfRows(FailingRows(error)))
    for path, body in (
        (ENQUEUE, {"rollouts": [{"input": 1}]}),
        (DEQUEUE, {}),
        (f"{V1}/spans", SPAN),
        (f"{V1}/spans/next", {"rollout_id": "r", "attempt_id": "a"}),
        (f"{V1}/rollouts/r/attempts/a", {}),
        (f"{V1}/workers/w", {}),
        (f"{V1}/rollouts/search", {}),
        (f"{V1}/spans/search", {"rollout_id": "r"}),
        (f"{V1}/waits/rollouts", {"rollout_ids": []}),
        ("/v1/lightning/spans", {"spans": [SPAN]}),
    ):
        answer = await client.post(path, json=body)
        assert (path, answer.status_code, answer.headers["retry-after"]) == (path, 503, "1")
        overloaded = isinstance(error, OverloadedError)
        reason = "Too many calls wait already" if overloaded else "The database is not available"
        assert answer.json()["detail"] == f"{reason}; try again"
    for path in (f"{V1}/rollouts/r", "/v1/lightning/rollouts", "/v1/lightning/spans?rollout_id=r"):
        answer = await client.get(path)
        assert (path, answer.status_code, answer.headers["retry-after"]) == (path, 503, "1")
