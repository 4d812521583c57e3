"""Every route of the protocol: statuses, bodies, nulls, literals, pages."""

import json
from typing import Any

import pytest

from lightning_sql.store.factory import open_store
from lightning_sql.testing.contract.store_contains import CONTAINS_NAMES, CONTAINS_NEEDLES

V1 = "/v1/agl"
ROLLOUT_KEYS = {
    "rollout_id",
    "input",
    "start_time",
    "end_time",
    "mode",
    "resources_id",
    "status",
    "config",
    "metadata",
}


async def start(client: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post(f"{V1}/rollouts", json={"input": 1} | fields)
    assert answer.status_code == 201
    return answer.json()


def span(rollout: dict[str, Any], number: int, **changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout["rollout_id"],
        "attempt_id": rollout["attempt"]["attempt_id"],
        "sequence_id": number,
        "trace_id": "0" * 32,
        "span_id": f"{number:016x}",
        "parent_id": None,
        "name": "n",
        "status": {"status_code": "OK", "more": [1]},
        "attributes": {"int": 1, "float": 1.0, "bool": True, "list": [1.0, 2.0]},
        "events": [{"name": "e", "attributes": {}, "extra": 1}],
        "links": [],
        "start_time": 1.5,
        "end_time": None,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
        "extra": {"kept": None},
    } | changes


async def test_queue(client: Any) -> None:
    answer = await client.post(
        f"{V1}/queues/rollouts/enqueue", json={"rollouts": [{"input": n, "mode": "train"} for n in range(3)]}
    )
    assert answer.status_code == 201
    assert [(r["input"], r["status"], r.keys()) for r in answer.json()] == [
        (n, "queuing", ROLLOUT_KEYS) for n in range(3)
    ]
    answer = await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": []})
    assert (answer.status_code, answer.json()) == (201, [])
    answer = await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}, {}]})
    assert answer.status_code == 422
    for limit in (0, -1, -(10**30)):
        answer = await client.post(f"{V1}/queues/rollouts/dequeue", json={"limit": limit, "worker_id": "w"})
        assert (answer.status_code, answer.json()) == (200, [])
    assert (await client.get(f"{V1}/workers")).json()["total"] == 0
    answer = await client.post(f"{V1}/queues/rollouts/dequeue")
    assert [(r["input"], r["attempt"]["sequence_id"]) for r in answer.json()] == [(0, 1)]
    answer = await client.post(f"{V1}/queues/rollouts/dequeue", json={"limit": 10**30, "worker_id": "w"})
    assert [(r["input"], r["attempt"]["worker_id"], r["status"]) for r in answer.json()] == [
        (1, "w", "preparing"),
        (2, "w", "preparing"),
    ]


async def test_rollout_with_and_without_attempt(client: Any) -> None:
    rollout = await start(client, mode="val", metadata={"a": 1}, worker_id="w")
    assert rollout.keys() == ROLLOUT_KEYS | {"attempt"}
    path = f"{V1}/rollouts/{rollout['rollout_id']}"
    assert (await client.get(path)).json() == rollout
    updated = await client.post(path, json={"status": "succeeded"})
    assert (updated.status_code, updated.json().keys()) == (200, ROLLOUT_KEYS)
    waited = await client.post(f"{V1}/waits/rollouts", json={"rollout_ids": [rollout["rollout_id"]] * 2})
    assert waited.json() == [updated.json()] * 2
    page = (await client.get(f"{V1}/rollouts")).json()
    assert page["items"] == [updated.json() | {"attempt": rollout["attempt"]}]
    [queued] = (await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]})).json()
    assert (await client.get(f"{V1}/rollouts/{queued['rollout_id']}")).json() == queued


async def test_rollout_update_nulls(client: Any) -> None:
    rollout = await start(client, mode="val", metadata={"a": 1}, resources_id="rs")
    path = f"{V1}/rollouts/{rollout['rollout_id']}"
    same = {key: value for key, value in rollout.items() if key != "attempt"}
    assert (await client.post(path, json={})).json() == same
    assert (await client.post(path, json={"surprise": 1})).json() == same
    nulls = {"input": None, "mode": None, "resources_id": None, "metadata": None}
    assert (await client.post(path, json=nulls)).json() == same | nulls
    for name in ("status", "config"):
        answer = await client.post(path, json={name: None, "input": "changed"})
        assert (answer.status_code, answer.json().keys()) == (400, {"detail"})
    assert (await client.post(path, json={"config": {"max_attempts": 2}})).json() == same | nulls | {
        "config": same["config"] | {"max_attempts": 2}
    }


async def test_attempt_update_nulls(client: Any) -> None:
    rollout = await start(client)
    path = f"{V1}/rollouts/{rollout['rollout_id']}/attempts"
    for name in ("status", "worker_id", "last_heartbeat_time", "metadata"):
        answer = await client.post(f"{path}/latest", json={name: None})
        assert (answer.status_code, answer.json().keys()) == (400, {"detail"})
    attempt = rollout["attempt"]
    assert (await client.post(f"{path}/{attempt['attempt_id']}", json={})).json() == attempt
    changes = {"worker_id": "", "metadata": {}, "last_heartbeat_time": 12}
    assert (await client.post(f"{path}/latest", json=changes)).json() == attempt | changes


async def test_worker_update_nulls(client: Any) -> None:
    path = f"{V1}/workers/w"
    assert (await client.post(path, json={"heartbeat_stats": None})).status_code == 400
    assert (await client.get(path)).json() is None
    first = (await client.post(path, json={"heartbeat_stats": {"cpu": 1}})).json()
    assert first["heartbeat_stats"] == {"cpu": 1}
    for body in ({}, {"surprise": None}):
        assert (await client.post(path, json=body)).json()["heartbeat_stats"] == {"cpu": 1}
    assert (await client.post(path)).json()["heartbeat_stats"] == {"cpu": 1}
    assert (await client.post(path, json={"heartbeat_stats": {}})).json()["heartbeat_stats"] == {}


async def test_attempts(client: Any) -> None:
    rollout = await start(client)
    path = f"{V1}/rollouts/{rollout['rollout_id']}/attempts"
    answer = await client.post(path, json={"worker_id": "w"})
    assert (answer.status_code, answer.json()["attempt"]["sequence_id"]) == (201, 2)
    assert (await client.post(path)).json()["attempt"]["sequence_id"] == 3
    assert (await client.get(f"{path}/latest")).json()["sequence_id"] == 3
    page = (await client.get(f"{path}?limit=2&offset=1&sort_order=desc")).json()
    assert [a["sequence_id"] for a in page["items"]] == [2, 1]
    assert (page["limit"], page["offset"], page["total"]) == (2, 1, 3)
    body = {"limit": 2, "offset": 1, "sort_order": "desc", "sort_by": None}
    page = (await client.post(f"{path}/search", json=body)).json()
    assert [a["sequence_id"] for a in page["items"]] == [2, 3]


async def test_spans(client: Any) -> None:
    rollout = await start(client)
    sent = span(rollout, 5)
    answer = await client.post(f"{V1}/spans", json=sent)
    assert answer.status_code == 201
    stored = answer.json()
    assert stored == sent | {
        "status": sent["status"] | {"description": None},
        "events": [sent["events"][0] | {"timestamp": None}],
    }
    assert {type(value) for value in stored["attributes"].values()} == {int, float, bool, list}
    again = await client.post(f"{V1}/spans", json=sent | {"name": "other"})
    assert (again.status_code, again.json()) == (201, None)
    ids = {"rollout_id": rollout["rollout_id"], "attempt_id": "any"}
    assert (await client.post(f"{V1}/spans/next", json=ids)).json() == {"sequence_id": 6}
    await client.post(f"{V1}/spans", json=span(rollout, 2, name="second", parent_id="p"))
    query = {"rollout_id": rollout["rollout_id"], "attempt_id": "latest"}
    for filters, numbers in (
        ({}, [2, 5]),
        ({"name": "second"}, [2]),
        ({"name_contains": "econ", "span_id": f"{5:016x}", "filter_logic": "or"}, [2, 5]),
        ({"parent_id_contains": ""}, [2]),
        ({"filter_logic": "or"}, [2, 5]),
        ({"sort_by": "sequence_id", "sort_order": "desc"}, [5, 2]),
    ):
        by_get = await client.get(f"{V1}/spans", params=query | filters)
        by_post = await client.post(f"{V1}/spans/search", json=query | filters)
        assert by_get.json() == by_post.json()
        assert [s["sequence_id"] for s in by_get.json()["items"]] == numbers
    unsorted = await client.post(f"{V1}/spans/search", json=query | {"sort_by": None})
    assert [s["sequence_id"] for s in unsorted.json()["items"]] == [5, 2]
    too_far = await client.post(f"{V1}/spans", json=span(rollout, 2**62))
    assert too_far.status_code == 422


async def test_resources(client: Any) -> None:
    llm = {"resource_type": "llm", "endpoint": "e", "model": "m"}
    assert (await client.get(f"{V1}/resources/latest")).json() is None
    first = await client.post(f"{V1}/resources", json={"main": llm | {"more": 1}})
    assert first.status_code == 201
    assert first.json()["resources"] == {"main": llm | {"api_key": None, "sampling_parameters": {}}}
    assert first.json()["version"] == 1
    path = f"{V1}/resources/{first.json()['resources_id']}"
    second = await client.post(path, json={})
    assert (second.status_code, second.json()["version"], second.json()["resources"]) == (200, 2, {})
    assert (await client.get(path)).json() == second.json()
    named = await client.post(f"{V1}/resources/search", json={})
    assert (named.status_code, named.json()["version"]) == (200, 1)
    assert (await client.get(f"{V1}/resources/latest")).json() == named.json()
    page = (await client.get(f"{V1}/resources?resources_id_contains=ear&resources_id=search")).json()
    assert page["items"] == [named.json()]


async def test_literals_win_only_for_their_own_method(client: Any) -> None:
    rollout = await start(client)
    for worker_id in ("latest", "x y", "ü"):
        assert (await client.post(f"{V1}/workers/{worker_id}")).json()["worker_id"] == worker_id
    assert (await client.get(f"{V1}/workers/search")).json() is None
    assert (await client.post(f"{V1}/workers/search", json={})).json()["total"] == 3
    assert (await client.get(f"{V1}/rollouts/search")).status_code == 404
    assert (await client.get(f"{V1}/rollouts/search/attempts")).json()["total"] == 0
    updated = await client.post(f"{V1}/resources/latest", json={})
    assert (updated.status_code, updated.json()["resources_id"]) == (200, "latest")
    attempt = await client.post(f"{V1}/rollouts/{rollout['rollout_id']}/attempts/latest", json={"status": "running"})
    assert attempt.json()["attempt_id"] == rollout["attempt"]["attempt_id"]
    answer = await client.get(f"{V1}/rollouts/{rollout['rollout_id']}/attempts/search")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_lists_and_nulls_in_queries(client: Any) -> None:
    first, second = await start(client), await start(client)
    await client.post(f"{V1}/rollouts/{second['rollout_id']}", json={"status": "failed"})
    for query, expected in (
        ("status_in=preparing&status_in=failed", 2),
        ("status_in=failed", 1),
        (f"rollout_id_in={first['rollout_id']}&status_in=failed", 0),
        (f"rollout_id_in={first['rollout_id']}&status_in=failed&filter_logic=or", 2),
        ("rollout_id_contains=", 2),
        ("rollout_id_contains=%25", 0),
        ("filter_logic=or", 2),
        ("unknown=1", 2),
    ):
        assert (await client.get(f"{V1}/rollouts?{query}")).json()["total"] == expected, query
    for body, expected in (
        ({"status_in": None, "rollout_id_contains": None, "sort_by": None}, 2),
        ({"status_in": []}, 0),
        ({"status_in": [], "rollout_id_in": [first["rollout_id"]], "filter_logic": "or"}, 1),
    ):
        assert (await client.post(f"{V1}/rollouts/search", json=body)).json()["total"] == expected, body


@pytest.mark.parametrize("path", ["rollouts", "rollouts/r/attempts", "spans", "resources", "workers"])
async def test_pages(client: Any, path: str) -> None:
    required = {"rollout_id": "r"} if path == "spans" else {}
    for query in ({"limit": 0}, {"limit": -2}, {"offset": -1}, {"sort_by": "nope"}, {"sort_by": ""}):
        answer = await client.get(f"{V1}/{path}", params=required | query)
        assert (query, answer.status_code, answer.json().keys()) == (query, 400, {"detail"})
    for query in ({"limit": "x"}, {"offset": "1.5"}, {"sort_order": "up"}):
        assert (await client.get(f"{V1}/{path}", params=required | query)).status_code == 422
    window = {"limit": 2**70, "offset": 2**80}
    answer = await client.get(f"{V1}/{path}", params=required | window)
    assert answer.json() == {"items": [], "total": 0} | window
    if path != "resources":
        assert (await client.post(f"{V1}/{path}/search", json=required | window)).json() == answer.json()
        assert (await client.post(f"{V1}/{path}/search", json=required | {"limit": 0})).status_code == 400


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("rollouts", "config"),
        ("rollouts", "metadata"),
        ("rollouts", "attempt"),
        ("spans", "attributes"),
        ("resources", "resources"),
        ("workers", "heartbeat_stats"),
    ],
)
async def test_fields_without_an_order(client: Any, path: str, field: str) -> None:
    answer = await client.get(f"{V1}/{path}", params={"sort_by": field, "rollout_id": "r"})
    assert (answer.status_code, answer.json().keys()) == (400, {"detail"})


async def test_statistics_and_health(client: Any) -> None:
    await start(client, worker_id="w")
    counts = (await client.get(f"{V1}/statistics")).json()
    assert {key: counts[key] for key in counts if key.startswith("total_")} == {
        "total_rollouts": 1,
        "total_attempts": 1,
        "total_spans": 0,
        "total_resources": 0,
        "total_workers": 1,
    }
    assert isinstance(counts["name"], str)
    assert counts["uptime"] >= 0
    assert (await client.get(f"{V1}/health")).json() == {"status": "ok"}
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    assert (await client.get("/readyz")).json() == {"status": "ready"}


@pytest.mark.parametrize("timeout", [0, -1, 0.01, -1e999])
async def test_waits_end(client: Any, timeout: float) -> None:
    rollout = await start(client)
    body = {"rollout_ids": [rollout["rollout_id"], "unknown"], "timeout": timeout}
    content = json.dumps(body).encode()
    answer = await client.post(f"{V1}/waits/rollouts", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()) == (200, [])


@pytest.mark.parametrize("timeout", [None, 1e300, float("inf")])
async def test_finished_rollouts_are_not_waited_for(client: Any, timeout: float | None) -> None:
    rollout = await start(client)
    await client.post(f"{V1}/rollouts/{rollout['rollout_id']}", json={"status": "cancelled"})
    content = json.dumps({"rollout_ids": [rollout["rollout_id"], "unknown"], "timeout": timeout})
    answer = await client.post(
        f"{V1}/waits/rollouts", content=content.encode(), headers={"content-type": "application/json"}
    )
    assert [r["status"] for r in answer.json()] == ["cancelled"]


@pytest.mark.parametrize("backend", ["memory://", "sqlite"])
async def test_contains_is_literal_in_a_url_and_in_a_body(serve: Any, sqlite_url: str, backend: str) -> None:
    async with await open_store(sqlite_url if backend == "sqlite" else backend) as opened:
        client = await serve(store=opened)
        for name in CONTAINS_NAMES:
            await opened.update_worker(name)
        for needle in CONTAINS_NEEDLES:
            expected = {name for name in CONTAINS_NAMES if needle in name}
            in_url = await client.get(f"{V1}/workers", params={"worker_id_contains": needle})
            in_body = await client.post(f"{V1}/workers/search", json={"worker_id_contains": needle})
            for answer in (in_url, in_body):
                assert {worker["worker_id"] for worker in answer.json()["items"]} == expected, needle
