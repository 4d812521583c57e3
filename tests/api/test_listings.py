"""Our own pages: the protocol's, with the count left out if nobody asks for it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightning_sql.store.interface import LightningStore
from tests.api.bodies import SPAN
from tests.api.fakes import PagesOfSpans, StoreOfRows, span_row
from tests.backends import NewStore

V1 = "/v1/agl"
OWN = "/v1/lightning"
PROBLEM = "application/problem+json"


@pytest.fixture(params=["memory", "sqlite"])
async def listed_store(request: pytest.FixtureRequest, new_store: NewStore) -> AsyncIterator[LightningStore]:
    """A store without rows, and one with them."""
    store = new_store(request.param)
    yield store
    await store.close()


@pytest.fixture
async def listed(serve: Any, listed_store: LightningStore) -> Any:
    return await serve(store=listed_store)


async def fill(client: Any) -> str:
    body = {"rollouts": [{"input": number} for number in range(4)]}
    await client.post(f"{V1}/queues/rollouts/enqueue", json=body)
    [rollout] = (await client.post(f"{V1}/queues/rollouts/dequeue", json={})).json()
    ids = {"rollout_id": rollout["rollout_id"], "attempt_id": rollout["attempt"]["attempt_id"]}
    for number in range(3):
        await client.post(f"{V1}/spans", json=SPAN | ids | {"span_id": str(number), "sequence_id": number})
    return rollout["rollout_id"]


QUERIES = [
    "",
    "limit=2&offset=1&sort_by=start_time&sort_order=desc",
    "limit=1&offset=100",
    "filter_logic=or",
]


@pytest.mark.parametrize("query", QUERIES)
async def test_they_are_the_pages_of_the_protocol(listed: Any, query: str) -> None:
    rollout_id = await fill(listed)
    for path, more in (
        ("rollouts", "status_in=queuing&status_in=running"),
        ("rollouts", ""),
        ("spans", f"rollout_id={rollout_id}"),
        ("spans", f"rollout_id={rollout_id}&attempt_id=latest&name_contains=n"),
    ):
        asked = "&".join(part for part in (query, more) if part)
        protocol = await listed.get(f"{V1}/{path}?{asked}")
        assert protocol.status_code == 200
        expected = protocol.json()
        assert expected["total"] > 0
        for total in ("", "&total=true", "&total=1"):
            answer = await listed.get(f"{OWN}/{path}?{asked}{total}")
            assert answer.json() == expected
        answer = await listed.get(f"{OWN}/{path}?{asked}&total=false")
        assert answer.json() == expected | {"total": None}
        assert list(answer.json()) == list(expected)


@pytest.mark.parametrize(
    ("path", "status", "location"),
    [
        ("rollouts?limit=0", 400, None),
        ("rollouts?offset=-1", 400, None),
        ("rollouts?sort_by=input", 400, None),
        ("rollouts?sort_by=nope&total=false", 400, None),
        ("spans?rollout_id=r&limit=-2", 400, None),
        ("spans", 422, "rollout_id"),
        ("rollouts?limit=x", 422, "limit"),
        ("rollouts?total=perhaps", 422, "total"),
        ("rollouts?status_in=nope", 422, "status_in"),
        ("spans?rollout_id=r&filter_logic=xor", 422, "filter_logic"),
    ],
)
async def test_mistakes_are_problems(listed: Any, path: str, status: int, location: str | None) -> None:
    answer = await listed.get(f"{OWN}/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    problem = answer.json()
    assert (problem["type"], problem["status"]) == ("about:blank", status)
    assert problem["title"]
    assert problem["detail"]
    if location is None:
        assert "errors" not in problem
    else:
        assert problem["errors"][0]["loc"][:2] == ["query", location]


async def test_the_store_is_told_not_to_count(serve: Any) -> None:
    rows = PagesOfSpans([[span_row(1)], [span_row(2)]])
    client = await serve(store=StoreOfRows(rows))
    counted = (await client.get(f"{OWN}/spans?rollout_id=r")).json()
    not_counted = (await client.get(f"{OWN}/spans?rollout_id=r&total=false")).json()
    assert [query.total for query in rows.asked] == [True, False]
    assert (counted["total"], not_counted["total"]) == (2, None)
    assert counted["items"] == not_counted["items"]


async def test_only_what_there_is(listed: Any) -> None:
    for method, path, allowed in (
        ("POST", f"{OWN}/rollouts", "GET"),
        ("PUT", f"{OWN}/spans", "GET, POST"),
        ("DELETE", f"{OWN}/spans", "GET, POST"),
    ):
        answer = await listed.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    for path in (OWN, f"{OWN}/", f"{OWN}/workers"):
        assert (await listed.get(path, follow_redirects=False)).status_code == 404
