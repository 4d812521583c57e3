"""The OpenAPI document describes every route, and describes it as it is."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_api.documentation import openapi_document
from lightning_api.routes import OPERATIONS
from lightning_api.settings import Settings

V1 = "/v1/agl"
PROTOCOL = {
    ("GET", f"{V1}/health", 200),
    ("GET", f"{V1}/statistics", 200),
    ("POST", f"{V1}/queues/rollouts/enqueue", 201),
    ("POST", f"{V1}/queues/rollouts/dequeue", 200),
    ("POST", f"{V1}/rollouts", 201),
    ("GET", f"{V1}/rollouts", 200),
    ("POST", f"{V1}/rollouts/search", 200),
    ("GET", f"{V1}/rollouts/{{rollout_id}}", 200),
    ("POST", f"{V1}/rollouts/{{rollout_id}}", 200),
    ("GET", f"{V1}/rollouts/{{rollout_id}}/attempts", 200),
    ("POST", f"{V1}/rollouts/{{rollout_id}}/attempts/search", 200),
    ("POST", f"{V1}/rollouts/{{rollout_id}}/attempts", 201),
    ("GET", f"{V1}/rollouts/{{rollout_id}}/attempts/latest", 200),
    ("POST", f"{V1}/rollouts/{{rollout_id}}/attempts/{{attempt_id}}", 200),
    ("GET", f"{V1}/spans", 200),
    ("POST", f"{V1}/spans/search", 200),
    ("POST", f"{V1}/spans", 201),
    ("POST", f"{V1}/spans/next", 200),
    ("GET", f"{V1}/resources", 200),
    ("POST", f"{V1}/resources", 201),
    ("GET", f"{V1}/resources/latest", 200),
    ("GET", f"{V1}/resources/{{resources_id}}", 200),
    ("POST", f"{V1}/resources/{{resources_id}}", 200),
    ("GET", f"{V1}/workers", 200),
    ("POST", f"{V1}/workers/search", 200),
    ("GET", f"{V1}/workers/{{worker_id}}", 200),
    ("POST", f"{V1}/workers/{{worker_id}}", 200),
    ("POST", f"{V1}/waits/rollouts", 200),
    ("POST", "/v1/lightning/spans", 200),
    ("POST", "/v1/lightning/calls", 200),
    ("GET", "/v1/lightning/rollouts", 200),
    ("GET", "/v1/lightning/spans", 200),
    ("POST", "/v1/traces", 200),
    ("POST", "/v1/metrics", 501),
    ("POST", "/v1/logs", 501),
    ("POST", "/v1/development/profiles", 501),
    ("GET", "/healthz", 200),
    ("GET", "/readyz", 200),
}


@pytest.fixture
def document() -> dict[str, Any]:
    return openapi_document(OPERATIONS, Settings())


def described(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_it_is_served(client: Any) -> None:
    answer = await client.get("/schema")
    assert answer.headers["content-type"] == "application/vnd.oai.openapi+json"
    assert answer.json()["openapi"].startswith("3.1.")
    assert (await client.get("/schema/openapi.json")).json() == answer.json()
    page = await client.get("/schema", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    for _method, path, _status in PROTOCOL:
        assert path in page.text


def test_every_route_is_described(document: dict[str, Any]) -> None:
    found = {
        (method, path, next(int(status) for status in operation["responses"] if status[0] == "2" or status == "501"))
        for method, path, operation in described(document)
    }
    assert found == PROTOCOL
    names = [operation["operationId"] for _method, _path, operation in described(document)]
    assert len(set(names)) == len(names)
    for _method, _path, operation in described(document):
        assert operation["summary"]
        assert operation["tags"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        prefix, _, name = reference.rpartition("/")
        assert prefix == "#/components/schemas"
        assert name in document["components"]["schemas"]
    assert {"Span-Input", "Span-Output", "AttemptedRollout", "ResourcesUpdate", "Worker"} <= document["components"][
        "schemas"
    ].keys()


def test_parameters_bodies_and_answers(document: dict[str, Any]) -> None:
    for method, path, operation in described(document):
        parameters = operation["parameters"]
        assert {p["name"] for p in parameters if p["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
        assert all("schema" in parameter for parameter in parameters)
        if method == "POST" and path.startswith(V1):
            assert operation["requestBody"]["content"]["application/json"]["schema"]
            assert {"400", "413", "422"} <= operation["responses"].keys()
        for status, response in operation["responses"].items():
            if status != "501":
                [content] = response["content"].values()
                assert content["schema"]
    query = {p["name"]: p for p in document["paths"][f"{V1}/spans"]["get"]["parameters"]}
    assert query["rollout_id"]["required"]
    assert not query["limit"]["required"]
    assert query["filter_logic"]["schema"]["enum"] == ["and", "or"]
    assert query["name"]["schema"]["type"] == "string"
    statuses = {p["name"]: p for p in document["paths"][f"{V1}/rollouts"]["get"]["parameters"]}["status_in"]["schema"]
    assert (statuses["type"], "queuing" in statuses["items"]["enum"]) == ("array", True)
    optional = document["paths"][f"{V1}/queues/rollouts/dequeue"]["post"]["requestBody"]
    assert not optional["required"]


def test_our_own_routes(document: dict[str, Any]) -> None:
    bulk = document["paths"]["/v1/lightning/spans"]["post"]
    assert bulk["requestBody"]["content"].keys() == {"application/json", "application/x-ndjson"}
    assert bulk["requestBody"]["required"]
    for method, path, operation in described(document):
        if path.startswith("/v1/lightning/"):
            for status, response in operation["responses"].items():
                lines = path == "/v1/lightning/calls"
                success = "application/x-ndjson" if lines else "application/json"
                media_types = {success if status == "200" else "application/problem+json"}
                assert response["content"].keys() == media_types, (method, path, status)
            assert {"422", "500", "503"} <= operation["responses"].keys()
    parameters = {p["name"]: p for p in document["paths"]["/v1/lightning/rollouts"]["get"]["parameters"]}
    assert parameters["total"]["schema"]["type"] == "boolean"
    protocol = {p["name"] for p in document["paths"][f"{V1}/rollouts"]["get"]["parameters"]}
    assert parameters.keys() == protocol | {"total"}


def test_security(document: dict[str, Any]) -> None:
    assert "security" not in document
    guarded = openapi_document(OPERATIONS, Settings(token="t"))
    assert guarded["security"] == [{"bearer": []}]
    for _method, path, operation in described(guarded):
        is_open = path in {f"{V1}/health", "/healthz", "/readyz"}
        assert (operation.get("security") == []) is is_open, path
        assert ("401" not in operation["responses"]) is is_open, path


async def test_answers_have_exactly_the_described_fields(client: Any, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert "end_time" in schemas["Span-Input"]["required"]
    assert "description" not in schemas["TraceStatus-Input"]["required"]
    assert "description" in schemas["TraceStatus-Output"]["required"]
    rollout = (await client.post(f"{V1}/rollouts", json={"input": 1, "worker_id": "w"})).json()
    assert rollout.keys() == schemas["AttemptedRollout"]["properties"].keys()
    assert rollout["attempt"].keys() == schemas["Attempt"]["properties"].keys()
    for name, record in (
        ("AttemptedRollout", rollout),
        ("Attempt", rollout["attempt"]),
        ("Worker", (await client.get(f"{V1}/workers/w")).json()),
        ("ResourcesUpdate", (await client.post(f"{V1}/resources", json={})).json()),
    ):
        assert set(schemas[name]["required"]) == record.keys()
    assert json.dumps(document)
