"""What a request body may be, and what comes back of it."""

import gzip
import json
import math
from typing import Any

import pytest

from lightning_sql.jsonable import NESTING_LIMIT

ROLLOUTS = "/v1/agl/rollouts"
JSON = {"content-type": "application/json"}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


async def start(client: Any, payload: str) -> Any:
    """Start a rollout whose input is a JSON text, and return the answer."""
    return await client.post(ROLLOUTS, content=f'{{"input": {payload}}}'.encode(), headers=JSON)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/vnd.api+json",
        "application/problem+json;v=1",
    ],
)
async def test_json_content_types(client: Any, content_type: str) -> None:
    answer = await client.post(ROLLOUTS, content=b'{"input": 1}', headers={"content-type": content_type})
    assert answer.status_code == 201
    assert answer.json()["input"] == 1


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/octet-stream", "text/json", "json", ""])
async def test_other_content_types_are_opaque(client: Any, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await client.post(ROLLOUTS, content=b'{"input": 1}', headers=headers)
    assert answer.status_code == 422
    assert [(e["type"], e["loc"]) for e in answer.json()["detail"]] == [("model_attributes_type", ["body"])]
    answer = await client.post("/v1/agl/resources", content=b"{}", headers=headers)
    assert [(e["type"], e["loc"]) for e in answer.json()["detail"]] == [("dict_type", ["body"])]


@pytest.mark.parametrize(
    "path",
    [
        ROLLOUTS,
        f"{ROLLOUTS}/search",
        f"{ROLLOUTS}/r",
        f"{ROLLOUTS}/r/attempts/latest",
        "/v1/agl/resources",
        "/v1/agl/spans",
    ],
)
async def test_a_required_body_is_missing(client: Any, path: str) -> None:
    answer = await client.post(path, headers=JSON)
    assert answer.status_code == 422
    assert answer.json() == {"detail": [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}]}


@pytest.mark.parametrize("headers", [JSON, {}, {"content-type": "application/octet-stream"}])
@pytest.mark.parametrize("body", [b"", b"null"])
async def test_an_optional_body_may_be_missing(client: Any, body: bytes, headers: dict[str, str]) -> None:
    expected = 422 if body and headers != JSON else 200
    assert (await client.post("/v1/agl/workers/w", content=body, headers=headers)).status_code == expected
    answer = await client.post("/v1/agl/queues/rollouts/dequeue", content=body, headers=headers)
    assert answer.status_code == expected
    if expected == 200:
        assert answer.json() == []


async def test_unknown_fields_are_ignored(client: Any) -> None:
    answer = await client.post(ROLLOUTS, json={"input": 1, "surprise": 2, "rollout_id": "mine"})
    assert answer.status_code == 201
    assert "surprise" not in answer.json()
    assert answer.json()["rollout_id"] != "mine"


@pytest.mark.parametrize(
    ("text", "character"), [("not json", 0), ('{"input": }', 10), ("{", 1), ('{"a": 1} x', 9), ('{"é": x}', 6)]
)
async def test_malformed_json_says_where(client: Any, text: str, character: int) -> None:
    answer = await client.post(ROLLOUTS, content=text.encode(), headers=JSON)
    assert answer.status_code == 422
    [error] = answer.json()["detail"]
    assert (error["type"], error["loc"]) == ("json_invalid", ["body", character])


@pytest.mark.parametrize(
    "body",
    [b'{"input": "\xff"}', '{"input": 1}'.encode("utf-16"), gzip.compress(b'{"input": 1}')],
    ids=["latin-1", "utf-16", "gzip"],
)
async def test_what_is_not_utf8_is_refused(client: Any, body: bytes) -> None:
    answer = await client.post(ROLLOUTS, content=body, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert isinstance(answer.json()["detail"], str)


async def test_a_byte_order_mark_is_skipped(client: Any) -> None:
    answer = await client.post(ROLLOUTS, content=b'\xef\xbb\xbf{"input": 1}', headers=JSON)
    assert answer.json()["input"] == 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -0.0,
        1e300,
        5e-324,
        0.1 + 0.2,
        2**53 + 1,
        -(10**30),
        10**4299,
        "",
        "\x00",
        "é😀\u2028",
        "\x1a",
        {"b": 1, "a": 2, "": None},
        [1, 1.0, "1", True],
        {"\x00": "\x00"},
    ],
)
async def test_payloads_come_back_equal(client: Any, value: Any) -> None:
    answer = await client.post(ROLLOUTS, json={"input": value, "metadata": {"value": value}})
    assert answer.status_code == 201
    read = await client.get(f"{ROLLOUTS}/{answer.json()['rollout_id']}")
    for record in (answer.json(), read.json()):
        assert json.dumps(record["input"]) == json.dumps(value)
        assert json.dumps(record["metadata"]["value"]) == json.dumps(value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_non_finite_floats_are_taken_and_answered_as_null(client: Any, store: Any, text: str) -> None:
    answer = await start(client, f'{{"value": {text}}}')
    assert answer.status_code == 201
    assert answer.json()["input"] == {"value": None}
    assert text not in answer.text
    kept = (await store.get_rollout_by_id(answer.json()["rollout_id"])).input["value"]
    assert not math.isfinite(kept)


async def test_lone_surrogates_are_answered_as_escapes(client: Any) -> None:
    answer = await start(
        client, '{"\\udc00": "\\ud800x", "nan": NaN, "smile": "\\ud83d\\ude00", "big": 1' + "0" * 40 + "}"
    )
    assert answer.status_code == 201
    assert json.loads(answer.content)["input"] == {"\udc00": "\ud800x", "nan": None, "smile": "😀", "big": 10**40}
    assert b"\\ud800x" in answer.content
    read = await client.get(f"{ROLLOUTS}/{answer.json()['rollout_id']}")
    assert json.loads(read.content)["input"] == json.loads(answer.content)["input"]


async def test_long_integers_end_somewhere(client: Any) -> None:
    assert (await start(client, "1" * 4300)).json()["input"] == int("1" * 4300)
    answer = await start(client, "1" * 4301)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["type"] == "json_invalid"


async def test_nesting_ends_somewhere(client: Any) -> None:
    answer = await start(client, nested(NESTING_LIMIT))
    assert answer.status_code == 201
    assert json.dumps(answer.json()["input"]) == nested(NESTING_LIMIT)
    page = await client.post(f"{ROLLOUTS}/search", json={})
    assert json.dumps(page.json()["items"][0]["input"]) == nested(NESTING_LIMIT)
    for depth in (NESTING_LIMIT + 1, NESTING_LIMIT + 5, 990, 5_000, 200_000):
        answer = await start(client, nested(depth))
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"][0] == "body"


async def test_many_brackets_are_not_depth(client: Any) -> None:
    wide = [[]] * 5_000
    assert (await client.post(ROLLOUTS, json={"input": wide})).json()["input"] == wide
    text = "[{" * 1_000
    assert (await client.post(ROLLOUTS, json={"input": text})).json()["input"] == text


async def test_a_large_payload_passes(client: Any) -> None:
    text = "x" * 10_000_000
    answer = await client.post(ROLLOUTS, json={"input": text})
    assert answer.status_code == 201
    assert answer.json()["input"] == text


async def test_lax_scalars(client: Any) -> None:
    answer = await client.post(
        ROLLOUTS,
        json={"input": 1, "config": {"max_attempts": "2", "timeout_seconds": 3, "unresponsive_seconds": "4.5"}},
    )
    assert answer.json()["config"] == {
        "timeout_seconds": 3.0,
        "unresponsive_seconds": 4.5,
        "max_attempts": 2,
        "retry_condition": [],
    }


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"max_attempts": 1.5}, "int_from_float"),
        ({"max_attempts": "x"}, "int_parsing"),
        ({"max_attempts": 0}, "greater_than_equal"),
        ({"max_attempts": 2**63}, "less_than_equal"),
        ({"timeout_seconds": "soon"}, "float_parsing"),
        ({"timeout_seconds": []}, "float_type"),
    ],
)
async def test_bad_scalars(client: Any, config: dict[str, Any], kind: str) -> None:
    answer = await client.post(ROLLOUTS, json={"input": 1, "config": config})
    assert answer.status_code == 422
    [error] = answer.json()["detail"]
    assert (error["type"], error["loc"]) == (kind, ["body", "config", next(iter(config))])


async def test_nan_is_no_time(client: Any) -> None:
    answer = await client.post(ROLLOUTS, content=b'{"input": 1, "config": {"timeout_seconds": NaN}}', headers=JSON)
    assert answer.status_code == 422
    assert json.loads(answer.content)["detail"][0]["input"] is None
