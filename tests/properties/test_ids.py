"""Any string as an id, wherever one is taken: it is what it was, or is refused, and names nothing else."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from lightning_api.routes import OPERATIONS
from lightning_sql.testing.samples import make_span
from tests.backends import POSTGRES, SQLITE, NewStore, ServerThread
from tests.properties.effort import effort
from tests.properties.strategies import has_surrogates, identifiers, is_identifier, short_texts

V1 = "/v1/agl"
KINDS = pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])
ids = st.one_of(
    identifiers,
    short_texts,
    st.sampled_from(
        ["x" * 513, "é" * 257, "x" * 10_240, "😀" * 2_560, "\x00", "search", "latest", "{worker_id}", "%00"]
    ),
)
LITERALS = {segment for declared in OPERATIONS for segment in declared.path.split("/")}


class Service:
    """Requests to a service, whose paths are as they are given."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._address, self._session = address, session

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json"}
        url = URL(self._address + path, encoded=True)
        async with self._session.request(method, url, data=data, headers=headers, allow_redirects=False) as response:
            answer = await response.read()
            return response.status, json.loads(answer) if answer else None


@contextmanager
def serving(kind: str, new_store: NewStore, server: ServerThread) -> Iterator[asyncio.Runner]:
    store = new_store(kind, scan_debounce_seconds=10.0)
    server.service.current_store = store
    with asyncio.Runner() as runner:
        try:
            yield runner
        finally:
            runner.run(server.close(store))


def in_path(identifier: str) -> str:
    return quote(identifier, safe="", errors="surrogatepass")


def refused(status: int, answer: Any, *place: Any) -> None:
    """It was refused because of what stands at this place."""
    assert status == 422, answer
    assert list(place) in [detail["loc"] for detail in answer["detail"]]


async def in_every_path(service: Service, identifier: str) -> None:
    """No path with an id is answered with anything but what it may be answered with."""
    segment = in_path(identifier)
    for declared in OPERATIONS:
        if "{" not in declared.path:
            continue
        for place in re.findall(r"{\w+}", declared.path):
            path = re.sub(r"{\w+}", "nobody", declared.path.replace(place, segment))
            status, answer = await service.call(declared.method, path, None if declared.method == "GET" else {})
            if "/" in identifier or identifier == "":
                assert status in (307, 404), (path, status)
            elif has_surrogates(identifier):
                assert status == 400, (path, status)
            else:
                assert status in (200, 201, 404, 405, 422), (path, status, answer)


async def as_a_name(service: Service, identifier: str, kind: str, field: str, body: Any) -> None:
    """What is written under an id in a path is found under that id."""
    path = f"{V1}/{kind}/{in_path(identifier)}"
    status, answer = await service.call("POST", path, body)
    if is_identifier(identifier):
        assert (status, answer[field]) == (200, identifier)
        status, found = await service.call("GET", path)
        assert (status, found) == (200, answer)
    else:
        refused(status, answer, "path", field)
        assert await service.call("GET", path) == (200, None)


async def in_every_body(service: Service, identifier: str) -> None:
    """An id in a body comes back, or is refused with its place named and nothing stored."""
    sound = is_identifier(identifier)
    _, started = await service.call("POST", f"{V1}/rollouts", {"input": 1})
    rollout, attempt_id = f"{V1}/rollouts/{started['rollout_id']}", started["attempt"]["attempt_id"]
    for path, body, field, success in (
        (f"{V1}/rollouts", {"input": 1, "worker_id": identifier}, "worker_id", 201),
        (f"{V1}/rollouts", {"input": 1, "resources_id": identifier}, "resources_id", 201),
        (rollout, {"resources_id": identifier}, "resources_id", 200),
        (f"{rollout}/attempts/{attempt_id}", {"worker_id": identifier}, "worker_id", 200),
        (f"{rollout}/attempts", {"worker_id": identifier}, "worker_id", 201),
        (f"{V1}/queues/rollouts/dequeue", {"worker_id": identifier}, "worker_id", 200),
        (f"{V1}/spans/next", {"rollout_id": identifier, "attempt_id": "a"}, "rollout_id", 200),
        (f"{V1}/spans/next", {"rollout_id": "r", "attempt_id": identifier}, "attempt_id", 200),
    ):
        status, answer = await service.call("POST", path, body)
        if not sound:
            refused(status, answer, "body", field)
            continue
        assert status == success, answer
        record = answer.get("attempt", answer) if field == "worker_id" and isinstance(answer, dict) else answer
        if isinstance(record, dict) and field in record:
            assert record[field] == identifier
    many = {"rollouts": [{"input": 1}, {"input": 1, "resources_id": identifier}]}
    status, answer = await service.call("POST", f"{V1}/queues/rollouts/enqueue", many)
    if sound:
        assert (status, answer[1]["resources_id"]) == (201, identifier)
        _, claimed = await service.call("POST", f"{V1}/queues/rollouts/dequeue", {"limit": 2, "worker_id": identifier})
        assert [record["attempt"]["worker_id"] for record in claimed] == [identifier] * 2
    else:
        refused(status, answer, "body", "rollouts", 1, "resources_id")
        assert await service.call("POST", f"{V1}/queues/rollouts/dequeue", {}) == (200, [])
    await in_spans(service, identifier, started["rollout_id"], attempt_id)
    for path in (f"{V1}/rollouts/search", f"{V1}/workers/search"):
        query = {"rollout_id_in": [identifier], "rollout_id_contains": identifier, "worker_id_contains": identifier}
        assert (await service.call("POST", path, query))[0] == 200
    waiting = {"rollout_ids": [identifier], "timeout": 0}
    assert await service.call("POST", f"{V1}/waits/rollouts", waiting) == (200, [])


async def in_spans(service: Service, identifier: str, rollout_id: str, attempt_id: str) -> None:
    for number, field in enumerate(("span_id", "trace_id", "parent_id", "rollout_id", "attempt_id")):
        span = make_span(rollout_id, attempt_id, f"s{number}").model_dump() | {field: identifier}
        status, answer = await service.call("POST", f"{V1}/spans", span)
        bulk_status, bulk = await service.call("POST", "/v1/lightning/spans", {"spans": [span]})
        assert bulk_status == 200
        if not is_identifier(identifier):
            refused(status, answer, "body", field)
            assert bulk["rejected"] == 1
        elif field in ("rollout_id", "attempt_id"):
            assert (status, bulk["rejected"]) == (404, 1)
        else:
            assert (status, answer[field], bulk["duplicates"]) == (201, identifier, 1)
            for query in ({field: identifier}, {f"{field}_contains": identifier}):
                wanted = {"rollout_id": rollout_id} | query
                status, found = await service.call("POST", f"{V1}/spans/search", wanted)
                assert status == 200
                assert identifier in [item[field] for item in found["items"]]
        for query in ({field: identifier}, {f"{field}_contains": identifier}):
            assert (await service.call("POST", f"{V1}/spans/search", {"rollout_id": rollout_id} | query))[0] == 200


@KINDS
def test_ids_in_paths(kind: str, new_store: NewStore, server: ServerThread) -> None:
    with serving(kind, new_store, server) as runner:

        async def check(identifier: str) -> None:
            async with aiohttp.ClientSession() as session:
                service = Service(server.address, session)
                await in_every_path(service, identifier)
                named = "/" not in identifier and identifier != "" and not has_surrogates(identifier)
                if named and identifier not in LITERALS:
                    await as_a_name(
                        service, identifier, "workers", "worker_id", {"heartbeat_stats": {"id": identifier}}
                    )
                    await as_a_name(service, identifier, "resources", "resources_id", {})

        @effort(60)
        @given(identifier=ids)
        @example("a/b")
        @example("search/attempts")
        @example("..")
        @example("😀" * 2_560)
        def each(identifier: str) -> None:
            runner.run(check(identifier))

        each()


@KINDS
def test_ids_in_bodies(kind: str, new_store: NewStore, server: ServerThread) -> None:
    with serving(kind, new_store, server) as runner:

        async def check(identifier: str) -> None:
            async with aiohttp.ClientSession() as session:
                await in_every_body(Service(server.address, session), identifier)

        @effort(40)
        @given(identifier=ids.map(lambda text: json.loads(json.dumps(text))))
        @example("x" * 512)
        @example("x" * 513)
        def each(identifier: str) -> None:
            runner.run(check(identifier))

        each()
