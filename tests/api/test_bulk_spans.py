"""Many spans in one request: an answer for each, in both forms, over rows and over records."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightning_api.routes import bulk
from lightning_sql.errors import DatabaseUnavailableError
from lightning_sql.jsonable import NESTING_LIMIT
from lightning_sql.records import Span
from lightning_sql.store.documents import SpanOutcome
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import assert_same, nested
from tests.api.bodies import SPAN
from tests.api.fakes import StoreOfRows
from tests.backends import NewStore

PATH = "/v1/lightning/spans"
JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}
PROBLEM = "application/problem+json"


@pytest.fixture(params=["memory", "sqlite"])
async def bulk_store(request: pytest.FixtureRequest, new_store: NewStore) -> AsyncIterator[LightningStore]:
    """A store without rows, and one with them."""
    store = new_store(request.param)
    yield store
    await store.close()


@pytest.fixture
async def bulk_client(serve: Any, bulk_store: LightningStore) -> Any:
    return await serve(store=bulk_store)


class Attempt:
    """An attempt to add spans to."""

    def __init__(self, rollout: Any) -> None:
        self.ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}

    def span(self, number: int, **changes: Any) -> dict[str, Any]:
        return SPAN | self.ids | {"span_id": f"{number:016x}", "sequence_id": number} | changes


@pytest.fixture
async def attempt(bulk_store: LightningStore) -> Attempt:
    return Attempt(await bulk_store.start_rollout({}))


def as_json(spans: list[Any]) -> tuple[bytes, dict[str, str]]:
    return json.dumps({"spans": spans}).encode(), JSON


def as_lines(spans: list[Any]) -> tuple[bytes, dict[str, str]]:
    return b"\n".join(json.dumps(span).encode() for span in spans) + b"\n", NDJSON


forms = pytest.mark.parametrize("form", [as_json, as_lines])


async def send(client: Any, form: Any, spans: list[Any]) -> Any:
    body, headers = form(spans)
    answer = await client.post(PATH, content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    receipt = answer.json()
    assert receipt.keys() == {"results", "stored", "duplicates", "rejected"}
    assert len(receipt["results"]) == len(spans)
    for name, status in (("stored", "stored"), ("duplicates", "duplicate"), ("rejected", "rejected")):
        assert receipt[name] == sum(result["status"] == status for result in receipt["results"])
    return receipt["results"]


async def stored(store: LightningStore, attempt: Attempt) -> list[Span]:
    return list((await store.query_spans(attempt.ids["rollout_id"])).items)


def stored_result(number: int) -> dict[str, Any]:
    return {"status": "stored", "sequence_id": number}


DUPLICATE = {"status": "duplicate"}


@forms
async def test_good_and_bad_spans(bulk_client: Any, bulk_store: LightningStore, attempt: Attempt, form: Any) -> None:
    other = Attempt(await bulk_store.start_rollout({}))
    spans = [
        attempt.span(3),
        {},
        other.span(3),
        attempt.span(3, name="again"),
        7,
        attempt.span(4, sequence_id="4", status={"status_code": "OK"}, extra={"kept": [1]}),
        attempt.span(5, attributes={"bad": None}),
        attempt.span(6, attempt_id="nope"),
        attempt.span(1),
    ]
    results = await send(bulk_client, form, spans)
    assert [result["status"] for result in results] == [
        *("stored", "rejected", "stored", "duplicate", "rejected", "stored", "rejected", "rejected", "stored")
    ]
    assert results[5] == stored_result(4)
    assert results[3] == DUPLICATE
    reasons = [result["reason"] for result in results if result["status"] == "rejected"]
    assert reasons[0].startswith("rollout_id: ")
    assert reasons[2].startswith("attributes.bad")
    assert reasons[3] == f"there is no attempt 'nope' of a rollout {attempt.ids['rollout_id']!r}"
    kept = await stored(bulk_store, attempt)
    assert [(span.sequence_id, span.name) for span in kept] == [(1, "n"), (3, "n"), (4, "n")]
    assert kept[2].model_extra == {"extra": {"kept": [1]}}
    assert len(await stored(bulk_store, other)) == 1
    assert await send(bulk_client, form, spans[:1]) == [DUPLICATE]
    number = await bulk_store.get_next_span_sequence_id(attempt.ids["rollout_id"], attempt.ids["attempt_id"])
    assert number == 5
    found = await bulk_store.get_rollout_by_id(attempt.ids["rollout_id"])
    assert found is not None
    assert found.status == "running"


@forms
async def test_nothing_to_store(bulk_client: Any, attempt: Attempt, form: Any) -> None:
    assert await send(bulk_client, form, []) == []
    [result] = await send(bulk_client, form, [attempt.span(1, rollout_id="nope")])
    assert result["status"] == "rejected"


@forms
@pytest.mark.parametrize(
    "value", ["\x00", "\ud800", "\x1aNaN", "😀", math.nan, -math.inf, 10**40, -0.0, [0.5, math.inf]]
)
async def test_odd_values(
    bulk_client: Any, bulk_store: LightningStore, attempt: Attempt, form: Any, value: Any
) -> None:
    spans = [attempt.span(1, attributes={"b": value, "a": 1}), attempt.span(2)]
    assert await send(bulk_client, form, spans) == [stored_result(1), stored_result(2)]
    kept = await stored(bulk_store, attempt)
    assert_same([span.attributes for span in kept], [span["attributes"] for span in spans])


@forms
async def test_what_cannot_be_stored_is_rejected_alone(
    bulk_client: Any, bulk_store: LightningStore, attempt: Attempt, form: Any
) -> None:
    spans = [
        attempt.span(1, more=nested(NESTING_LIMIT)),
        attempt.span(2, more=nested(NESTING_LIMIT + 1)),
        attempt.span(3, sequence_id=2**62),
        attempt.span(4, span_id="\x00"),
        attempt.span(5, trace_id="x" * 513),
        attempt.span(6),
    ]
    results = await send(bulk_client, form, spans)
    assert [result["status"] for result in results] == ["stored", *4 * ["rejected"], "stored"]
    assert "levels" in results[1]["reason"]
    assert len(await stored(bulk_store, attempt)) == 2


async def test_reasons_are_bounded_and_show_no_values(bulk_client: Any, attempt: Attempt) -> None:
    spans = [attempt.span(1, attributes={"x" * 10_000: None}), attempt.span(2, status={"status_code": "sk-secret"})]
    results = await send(bulk_client, as_json, spans)
    assert len(results[0]["reason"]) < 300
    assert "sk-secret" not in results[1]["reason"]


async def test_lines_as_they_come(bulk_client: Any, bulk_store: LightningStore, attempt: Attempt) -> None:
    lines = [
        b"",
        json.dumps(attempt.span(1)).encode(),
        b"   \r",
        b"not json",
        b"[1, 2",
        json.dumps(attempt.span(2)).encode() + b"\r",
        b'{"x": "\xff"}',
        b"\xef\xbb\xbf" + json.dumps(attempt.span(3)).encode(),
        json.dumps(attempt.span(4)).encode() + b" " + json.dumps(attempt.span(5)).encode(),
        json.dumps(attempt.span(6), ensure_ascii=False).encode(),
    ]
    answer = await bulk_client.post(
        PATH, content=b"\n".join(lines), headers={"content-type": "Application/X-NDJSON; charset=utf-8"}
    )
    assert [result["status"] for result in answer.json()["results"]] == [
        *("stored", "rejected", "rejected", "stored", "rejected", "stored", "rejected", "stored")
    ]
    assert [span.sequence_id for span in await stored(bulk_store, attempt)] == [1, 2, 3, 6]
    assert (await bulk_client.post(PATH, content=b"", headers=NDJSON)).json()["results"] == []


@pytest.mark.parametrize(
    ("body", "headers", "kind", "location"),
    [
        (b"", JSON, "missing", []),
        (b"", {}, "missing", []),
        (b'{"spans": []}', {}, "missing", []),
        (b'{"spans": []}', {"content-type": "text/plain"}, "missing", []),
        (b"not json", JSON, "json_invalid", [0]),
        (b'{"spans": [}', JSON, "json_invalid", [11]),
        (b'{"spans": [{"x": "\xff"}]}', JSON, "json_invalid", [0]),
        (b'{"spans": [NaN, {"x": "\xff"}]}', JSON, "json_invalid", [0]),
        (b"[]", JSON, "dict_type", []),
        (b"null", JSON, "dict_type", []),
        (b"{}", JSON, "missing", ["spans"]),
        (b'{"spans": null}', JSON, "list_type", ["spans"]),
        (b'{"spans": {}}', JSON, "list_type", ["spans"]),
        (b"[" * 100_000, JSON, "json_invalid", [0]),
    ],
)
async def test_what_is_no_list_of_spans(
    bulk_client: Any, body: bytes, headers: dict[str, str], kind: str, location: list[Any]
) -> None:
    answer = await bulk_client.post(PATH, content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    problem = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail", "errors"}
    assert (problem["type"], problem["status"]) == ("about:blank", 422)
    [error] = problem["errors"]
    assert (error["type"], error["loc"]) == (kind, ["body", *location])


async def test_unknown_keys_beside_the_spans_are_ignored(bulk_client: Any, attempt: Attempt) -> None:
    body = json.dumps({"more": 1, "spans": [attempt.span(1)]}).encode()
    answer = await bulk_client.post(PATH, content=body, headers=JSON)
    assert answer.json()["results"] == [stored_result(1)]


class CountingRows:
    """Rows that store everything, and remember in which portions it came."""

    def __init__(self, error_at: int | None = None) -> None:
        self.portions: list[list[int]] = []
        self.keys: list[Any] = []
        self.error_at = error_at

    async def add_span_rows(self, spans: Any, *, strict: bool, idempotency_key: Any, part: int) -> Any:
        assert strict is False
        assert part == len(self.portions)
        self.keys.append(idempotency_key)
        if len(self.portions) == self.error_at:
            raise DatabaseUnavailableError("gone")
        self.portions.append([span.sequence_id for span in spans])
        return [SpanOutcome.STORED if span.sequence_id % 2 else SpanOutcome.DUPLICATE for span in spans]


def some_spans(count: int, **changes: Any) -> list[Any]:
    return [SPAN | {"span_id": str(number), "sequence_id": number} | changes for number in range(count)]


@forms
async def test_portions(serve: Any, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setattr(bulk, "CHUNK_SPANS", 3)
    rows = CountingRows()
    client = await serve(store=StoreOfRows(rows))
    results = await send(client, form, [*some_spans(4), "bad", *some_spans(8)[4:]])
    assert rows.portions == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert rows.keys == [None] * 3
    expected = [stored_result(number) if number % 2 else DUPLICATE for number in range(8)]
    assert results[:4] + results[5:] == expected
    assert results[4]["status"] == "rejected"


async def test_portions_have_a_size(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 6000)
    rows = CountingRows()
    client = await serve(store=StoreOfRows(rows))
    await send(client, as_json, [*some_spans(2, name="x" * 2000), *some_spans(1, name="y" * 9000), *some_spans(3)])
    assert rows.portions == [[0, 1], [0], [0, 1, 2]]


async def test_portions_of_records(new_store: NewStore, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_SPANS", 2)
    store = new_store("memory")
    attempt = Attempt(await store.start_rollout({}))
    client = await serve(store=store)
    spans = [attempt.span(number) for number in (1, 2, 1, 3, 2)] + [attempt.span(9, attempt_id="nope")] * 2
    results = await send(client, as_json, spans)
    assert results[:5] == [stored_result(1), stored_result(2), DUPLICATE, stored_result(3), DUPLICATE]
    assert [result["status"] for result in results[5:]] == ["rejected", "rejected"]
    await store.close()


async def test_a_database_that_goes_away(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_SPANS", 2)
    client = await serve(store=StoreOfRows(CountingRows(error_at=1)))
    answer = await client.post(PATH, content=as_json(some_spans(4))[0], headers=JSON)
    assert (answer.status_code, answer.headers["content-type"], answer.headers["retry-after"]) == (503, PROBLEM, "1")
    assert answer.json() == {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "The database is not available; try again",
    }


async def test_too_much_at_once(serve: Any) -> None:
    client = await serve(store=StoreOfRows(CountingRows()), body_limit=1000)
    answer = await client.post(PATH, content=as_lines(some_spans(4))[0], headers=NDJSON)
    assert (answer.status_code, answer.headers["content-type"]) == (413, PROBLEM)
    assert answer.json()["detail"] == "The body is too large"


async def test_a_failure_is_logged_and_not_told(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await serve(store=StoreOfRows(object()))
    answer = await client.post(PATH, content=as_json(some_spans(1))[0], headers=JSON)
    assert (answer.status_code, answer.headers["content-type"]) == (500, PROBLEM)
    assert answer.json()["detail"] == "Internal server error"
    assert "AttributeError" in caplog.text
