"""JSON as other programs write it: what it means to Python is what comes back, and what SQL can read."""

import asyncio
import json
import math
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given

from lightning_sql.store.sql_store import SqlStore
from tests.backends import POSTGRES, SQLITE, NewStore, ServerThread
from tests.properties.effort import effort
from tests.properties.strategies import json_attributes, json_texts
from tests.sql_reads import is_plain, members

V1 = "/v1/agl"
KINDS = pytest.mark.parametrize("kind", [SQLITE, POSTGRES])


class Service:
    """Requests with bodies as they are to a service, whose answers have exact floats or, as in the protocol, none."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._address, self._session = address, session

    async def call(self, path: str, body: str | None = None, *, exact: bool = True, kind: str = "json") -> Any:
        headers = {"content-type": f"application/{kind}", "accept": "application/json" + "; floats=exact" * exact}
        method = "GET" if body is None else "POST"
        data = None if body is None else body.encode()
        async with self._session.request(method, self._address + path, data=data, headers=headers) as response:
            answer = (await response.read()).decode()
            assert response.status in (200, 201), answer
            return json.loads(answer, parse_constant=None if exact else refuse)


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


def same(actual: Any, expected: Any) -> None:
    """Text also tells -0.0 from 0.0, 1 from 1.0, NaN from everything else, and one order of keys from another."""
    assert json.dumps(actual) == json.dumps(expected)


def with_nulls(value: Any) -> Any:
    """What is answered to those who do not ask for exact floats."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    return value


def span_text(rollout: Any, span_id: str, attributes: str = "{}", more: str = "") -> str:
    span = {
        "rollout_id": rollout["rollout_id"],
        "attempt_id": rollout["attempt"]["attempt_id"],
        "sequence_id": 1,
        "trace_id": "t",
        "span_id": span_id,
        "parent_id": None,
        "name": "n",
        "status": {"status_code": "OK", "description": None},
        "events": [],
        "links": [],
        "start_time": None,
        "end_time": None,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }
    return f'{json.dumps(span)[:-1]}, "attributes": {attributes}{more}}}'


async def payloads_come_back(service: Service, text: str) -> Any:
    value = json.loads(text)
    meant = {"m": value}
    started = await service.call(f"{V1}/rollouts", f'{{"input": {text}, "metadata": {{"m": {text}}}}}')
    same((started["input"], started["metadata"]), (value, meant))
    rollout = f"{V1}/rollouts/{started['rollout_id']}"
    attempt = await service.call(f"{rollout}/attempts/latest", None)
    attempt = await service.call(f"{rollout}/attempts/{attempt['attempt_id']}", f'{{"metadata": {{"m": {text}}}}}')
    same(attempt["metadata"], meant)
    same((await service.call(f"{rollout}/attempts/latest"))["metadata"], meant)
    same((await service.call(rollout))["input"], value)
    read = await service.call(rollout, exact=False)
    same((read["input"], read["metadata"]), (with_nulls(value), with_nulls(meant)))

    body = f'{{"rollouts": [{{"input": {text}, "metadata": {{"m": {text}}}}}]}}'
    [queued] = await service.call(f"{V1}/queues/rollouts/enqueue", body)
    same((queued["input"], queued["metadata"]), (value, meant))
    [claimed] = await service.call(f"{V1}/queues/rollouts/dequeue", '{"worker_id": "w"}')
    same((claimed["input"], claimed["metadata"]), (value, meant))
    updated = await service.call(f"{V1}/rollouts/{queued['rollout_id']}", f'{{"input": [{text}], "metadata": null}}')
    same((updated["input"], updated["metadata"]), ([value], None))

    same((await service.call(f"{V1}/workers/w", f'{{"heartbeat_stats": {{"m": {text}}}}}'))["heartbeat_stats"], meant)
    same((await service.call(f"{V1}/workers/w"))["heartbeat_stats"], meant)
    llm = f'{{"resource_type": "llm", "endpoint": "", "model": "", "sampling_parameters": {{"m": {text}}}}}'
    resources = await service.call(f"{V1}/resources/r", f'{{"x": {llm}}}')
    same(resources["resources"]["x"]["sampling_parameters"], meant)
    same((await service.call(f"{V1}/resources/r"))["resources"], resources["resources"])
    return started


async def spans_come_back(service: Service, rollout: Any, attributes: str, text: str) -> None:
    plain, custom, wanted = f"{V1}/spans", json.loads(text), json.loads(attributes)
    for span_id, more in (("plain", ""), ("more", f', "custom": {text}')):
        same((await service.call(plain, span_text(rollout, span_id, attributes, more)))["attributes"], wanted)
    bulk = [span_text(rollout, f"bulk {number}", attributes) for number in range(2)]
    answer = await service.call("/v1/lightning/spans", f'{{"spans": [{", ".join(bulk)}]}}')
    assert answer["stored"] == 2
    lines = "\n".join(span_text(rollout, f"line {number}", attributes).replace("\n", " ") for number in range(2))
    assert (await service.call("/v1/lightning/spans", lines, kind="x-ndjson"))["stored"] == 2
    for exact in (True, False):
        page = await service.call(f"{plain}?rollout_id={rollout['rollout_id']}", exact=exact)
        assert len(page["items"]) == 6
        for span in page["items"]:
            same(span["attributes"], wanted if exact else with_nulls(wanted))
        same(page["items"][1]["custom"], custom if exact else with_nulls(custom))


@KINDS
def test_bodies_come_back_exactly_and_sql_reads_them(kind: str, new_store: NewStore, server: ServerThread) -> None:
    store = new_store(kind, scan_debounce_seconds=10.0)
    assert isinstance(store, SqlStore)
    with asyncio.Runner() as runner:

        async def check(text: str, attributes: str) -> None:
            async with aiohttp.ClientSession() as session:
                service = Service(server.address, session)
                started = await payloads_come_back(service, text)
                await spans_come_back(service, started, attributes, text)
            # Where a name stands twice, or as an escape, databases differ in what they take for it.
            meant = json.loads(attributes)
            for name in {name for name in meant if is_plain(name)} | {"a"}:
                found = (await server.run(members(store, name, started["rollout_id"])))["spans.attributes"]
                assert len(found) == 6
                if name not in meant or is_plain(meant[name]):
                    assert found == [meant.get(name)] * 6

        @effort(40)
        @given(text=json_texts, attributes=json_attributes)
        @example("1", '{"\\u00e9": "x", "\\u0061": "y"}')
        @example("1", '{"a": "first", "b": 1, "a" : "last"}')
        @example("1", '{"a": "first", "\\u0061": "last"}')
        @example("1", '{"a": "first", "\\":": "x", "a": "last", "b\\\\": 1}')
        def each(text: str, attributes: str) -> None:
            runner.run(check(text, attributes))

        server.service.current_store = store
        try:
            each()
            assert len(runner.run(server.run(members(store, "a")))["workers.heartbeat_stats"]) == 1
        finally:
            runner.run(server.close(store))
