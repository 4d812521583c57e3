"""Answers that are sent chunk by chunk."""

import asyncio
import http.client
import json
import logging
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from lightning_api.app import create_app
from lightning_api.settings import Settings
from tests.api.bodies import SPAN
from tests.api.fakes import PagesOfSpans, StoreOfRows, span_row
from tests.backends import NewStore, ServerThread, server

__all__ = ["server"]

PATH = "/v1/agl/spans"
CHUNKS = [[span_row(number) for number in range(start, start + 3)] for start in (1, 4, 7)]


async def test_chunks_make_one_answer(serve: Any) -> None:
    rows = PagesOfSpans(CHUNKS)
    client = await serve(store=StoreOfRows(rows))
    answer = await client.get(f"{PATH}?rollout_id=r&offset=0&limit=9")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "content-length" not in answer.headers
    content = answer.json()
    assert [span["sequence_id"] for span in content["items"]] == list(range(1, 10))
    assert {name: content[name] for name in ("limit", "offset", "total")} == {"limit": 9, "offset": 0, "total": 9}
    assert rows.closed


@pytest.mark.parametrize("chunks", [[[], CHUNKS[0], [], CHUNKS[1], []], [[], []], [CHUNKS[0], []]])
async def test_chunks_may_be_empty(serve: Any, chunks: list[list[Any]]) -> None:
    client = await serve(store=StoreOfRows(PagesOfSpans(chunks)))
    content = (await client.post(f"{PATH}/search", json={"rollout_id": "r"})).json()
    expected = [row[2] for chunk in chunks for row in chunk]
    assert [span["sequence_id"] for span in content["items"]] == expected
    assert content["total"] == len(expected)


async def test_odd_rows_in_later_chunks(serve: Any) -> None:
    odd = [span_row(2, name="\ud800\x00", end_time=float("inf"), more={"x": float("nan")})]
    for accept, expected in (("*/*", None), ("application/json; floats=exact", float("inf"))):
        client = await serve(store=StoreOfRows(PagesOfSpans([CHUNKS[0], odd])))
        answer = await client.get(f"{PATH}?rollout_id=r", headers={"accept": accept})
        span = json.loads(answer.content)["items"][-1]
        assert (span["name"], span["end_time"]) == ("\ud800\x00", expected)
        assert (span["more"]["x"] is None) is (expected is None)


class Connection:
    """One request to an application, whose client reads and hangs up when the test says so."""

    def __init__(self, rows: PagesOfSpans) -> None:
        self.app = create_app(Settings(database_url="memory://"), cast(Any, StoreOfRows(rows)))
        self.sent: list[Any] = []
        self.may_send = asyncio.Semaphore(0)
        self.hangup = asyncio.Event()
        self._asked = False

    async def receive(self) -> Any:
        if self._asked:
            await self.hangup.wait()
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        await self.may_send.acquire()

    async def serve(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"rollout_id=r",
            "headers": [(b"host", b"service")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
            "state": {},
        }
        await self.app(cast(Any, scope), self.receive, self.send)


async def settled() -> None:
    """Give every task that can go on the time to do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_no_chunk_is_read_before_the_client_took_the_one_before() -> None:
    rows = PagesOfSpans(CHUNKS)
    connection = Connection(rows)
    serving = asyncio.create_task(connection.serve())
    taken: list[int] = []
    while not serving.done():
        await settled()
        taken.append(rows.read)
        connection.may_send.release()
    await serving
    # While the status, the three chunks, the end and the last message are on their way, and after that.
    assert taken == [0, 0, 1, 2, 2, 2, 2]
    assert connection.sent[-1]["more_body"] is False


async def test_a_client_that_hangs_up_stops_the_reading() -> None:
    rows = PagesOfSpans(CHUNKS)
    connection = Connection(rows)
    serving = asyncio.create_task(connection.serve())
    connection.may_send.release()
    connection.may_send.release()
    await settled()
    assert rows.read == 1
    connection.hangup.set()
    for _ in range(10):
        connection.may_send.release()
    await serving
    assert rows.read == 1
    assert rows.closed
    assert connection.sent[-1].get("more_body") is not False


async def test_a_cancelled_answer_closes_what_it_reads() -> None:
    rows = PagesOfSpans(CHUNKS)
    connection = Connection(rows)
    serving = asyncio.create_task(connection.serve())
    connection.may_send.release()
    connection.may_send.release()
    await settled()
    serving.cancel()
    await asyncio.wait([serving])
    assert rows.closed


async def test_a_failure_in_the_middle_is_logged_and_not_concealed(caplog: pytest.LogCaptureFixture) -> None:
    rows = PagesOfSpans(CHUNKS, RuntimeError("the disk is gone"))
    connection = Connection(rows)
    for _ in range(10):
        connection.may_send.release()
    await connection.serve()
    body = b"".join(message.get("body", b"") for message in connection.sent)
    assert body.startswith(b'{"items":[{')
    assert connection.sent[-1]["more_body"] is True
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(body)
    assert "the disk is gone" in caplog.text
    assert rows.closed


async def test_a_failure_in_the_middle_cuts_the_connection(
    server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    store: Any = StoreOfRows(PagesOfSpans(CHUNKS, RuntimeError("the disk is gone")))
    async with server.serving(store) as address:

        def ask() -> None:
            connection = http.client.HTTPConnection(cast(str, urlsplit(address).netloc), timeout=60)
            connection.request("GET", f"{PATH}?rollout_id=r")
            response = connection.getresponse()
            assert response.status == 200
            with pytest.raises(http.client.IncompleteRead):
                response.read()
            connection.close()

        await asyncio.to_thread(ask)


async def test_a_failure_before_the_first_byte_is_an_ordinary_one(serve: Any) -> None:
    class Failing(PagesOfSpans):
        async def span_page(self, query: Any) -> Any:
            raise RuntimeError("no page")

    client = await serve(store=StoreOfRows(Failing([])))
    answer = await client.get(f"{PATH}?rollout_id=r")
    assert (answer.status_code, answer.json()["error_type"]) == (500, "RuntimeError")


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "",
        "limit=2100&offset=150",
        "sort_by=name&sort_order=desc&limit=1500",
        "sort_by=end_time&offset=2499",
        "limit=1000",
    ],
)
async def test_long_pages_of_a_real_store(new_store: NewStore, serve: Any, query: str) -> None:
    answers = []
    for kind in ("sqlite", "memory"):
        store = new_store(kind)
        rollout = await store.start_rollout({})
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        client = await serve(store=store)
        spans = [
            SPAN | ids | {"span_id": str(number), "sequence_id": number % 7, "name": f"n{number % 5}"}
            for number in range(2500)
        ]
        assert (await client.post("/v1/lightning/spans", json={"spans": spans})).json()["stored"] == 2500
        answer = await client.get(f"{PATH}?rollout_id={rollout.rollout_id}&{query}")
        page = answer.json()
        answers.append([page["limit"], page["offset"], page["total"], [span["span_id"] for span in page["items"]]])
        if kind == "sqlite":
            assert ("content-length" in answer.headers) is (len(page["items"]) <= 1000)
        await store.close()
    assert answers[0] == answers[1]
