"""Several calls in one request: each is answered as if it had come alone."""

import asyncio
import json
import math
from typing import Any

import pytest

from lightning_api import client_together
from lightning_api.client_together import Answered, Asked, CallBatches, read_answers, written
from lightning_api.routes import together
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.errors import DatabaseUnavailableError, LightningError, RecordNotFoundError
from lightning_sql.store.collection_store import CollectionStore
from tests.api.test_errors import FailingStore

PATH = "/v1/lightning/calls"
HEADERS = {"content-type": "application/x-ndjson"}
ENQUEUE = "/v1/agl/queues/rollouts/enqueue"


def asked(path: str, content: Any = None, *, method: str | None = None, key: str | None = None) -> Asked:
    body = None if content is None else json.dumps(content).encode()
    return Asked(method or ("GET" if content is None else "POST"), path, body, key)


async def post(client: Any, *calls: Asked, **headers: str) -> list[tuple[int, Any]]:
    answer = await client.post(PATH, content=written(calls), headers=HEADERS | headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    answers = read_answers(answer.content, len(calls))
    return [(answered.status, json.loads(answered.body)) for answered in answers]


@pytest.fixture
async def client(serve: Any) -> Any:
    return await serve(store=CollectionStore(MemoryCollections()))


async def test_each_call_is_answered_as_if_it_were_alone(client: Any) -> None:
    calls = [
        asked(ENQUEUE, {"rollouts": [{"input": "a\nb"}, {"input": {"n": math.nan}}]}),
        asked("/v1/agl/rollouts/none"),
        asked(ENQUEUE, {"rollouts": 1}),
        asked("/v1/agl/nowhere"),
        asked("/v1/agl/rollouts?limit=x"),
        asked("/v1/agl/statistics", method="POST"),
        asked("/v1/agl/workers/a%20b", {}),
        Asked("POST", ENQUEUE, b"{", None),
        Asked("POST", ENQUEUE, b"\xff", None),
        asked("/v1/agl/workers/a%2Fb"),
    ]
    together_ = await post(client, *calls)
    assert [status for status, _ in together_] == [201, 404, 422, 404, 422, 405, 200, 422, 400, 404]
    for call, (status, content) in list(zip(calls, together_, strict=True))[1:]:
        alone = await client.request(
            call.method, call.path, content=call.body, headers={"content-type": "application/json"}
        )
        if call.path == "/v1/agl/workers/a%20b":
            assert content["worker_id"] == alone.json()["worker_id"] == "a b"
        else:
            assert (alone.status_code, alone.json()) == (status, content)
    assert [rollout["input"] for rollout in together_[0][1]] == ["a\nb", {"n": None}]


async def test_what_the_request_accepts_holds_for_its_calls(client: Any) -> None:
    body = written([asked(ENQUEUE, {"rollouts": [{"input": math.inf}]})])
    answer = await client.post(PATH, content=body, headers=HEADERS | {"accept": "application/json; floats=exact"})
    assert json.loads(read_answers(answer.content, 1)[0].body)[0]["input"] == math.inf


async def test_calls_of_one_key_take_place_once(client: Any) -> None:
    call = asked(ENQUEUE, {"rollouts": [{"input": 1}]}, key="k")
    [(_, [first])] = await post(client, call)
    [(_, [second])] = await post(client, call)
    assert first == second
    [(status, found)] = await post(client, call._replace(body=b'{"rollouts":[{"input":2}]}'))
    assert (status, found["detail"][0]["type"]) == (422, "idempotency_key_reused")
    [(status, _)] = await post(client, call._replace(key=""))
    assert status == 422


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", 0),
        (b"\n", 0),
        (b'{"method":"GET","path":"/v1/agl/health"}', 1),
        (b"no JSON\n\n", 0),
        (b'{"method":"GET","path":"/v1/agl/health"}\n\n[]\n\n', 2),
        (b'{"method":"PUT","path":"/v1/agl/health"}\n\n', 0),
        (b'{"method":"GET","path":"/v1/agl/health","more":1}\n\n', 0),
        (b'{"method":"GET","path":"/healthz"}\n\n', 0),
        (b'{"method":"POST","path":"/v1/lightning/calls"}\n\n', 0),
        (b'{"method":"GET","path":"/v1/agl/a b"}\n\n', 0),
        ('{"method":"GET","path":"/v1/agl/ä"}\n\n'.encode(), 0),
        ('{"method":"GET","path":"/v1/agl/health","key":"ä"}\n\n'.encode(), 0),
        (b'{"method":"GET","path":"/v1/agl/\xff"}\n\n', 0),
        (b'{"method":"GET","path":"/v1/agl/health"}\n\n' * (together.MOST_CALLS + 1), 0),
    ],
)
async def test_what_is_no_list_of_calls_is_refused_whole(client: Any, body: bytes, place: int) -> None:
    enqueue = written([asked(ENQUEUE, {"rollouts": [{"input": 1}]})])
    for content in (body, enqueue + body) if body and place == 0 and b"health" in body else (body,):
        answer = await client.post(PATH, content=content, headers=HEADERS)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["errors"][0]["loc"][0] == "body"
    assert (await client.get("/v1/agl/statistics")).json()["total_rollouts"] == 0


async def test_the_token_is_asked_for_once_and_holds_for_each(serve: Any) -> None:
    client = await serve(store=CollectionStore(MemoryCollections()), token="secret")
    body = written([asked(ENQUEUE, {"rollouts": [{"input": 1}]})])
    assert (await client.post(PATH, content=body, headers=HEADERS)).status_code == 401
    [(status, _)] = await post(client, asked(ENQUEUE, {"rollouts": [{"input": 1}]}), authorization="Bearer secret")
    assert status == 201


async def test_one_that_fails_does_not_keep_the_others_from_their_answers(serve: Any) -> None:
    client = await serve(store=FailingStore(DatabaseUnavailableError("away")))
    [broken, healthy] = await post(client, asked(ENQUEUE, {"rollouts": [{"input": 1}]}), asked("/v1/agl/health"))
    assert (broken[0], healthy) == (503, (200, {"status": "ok"}))


async def test_a_large_answer_is_to_be_asked_for_alone(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MOST_ANSWER_BYTES", 1000)
    large = asked(ENQUEUE, {"rollouts": [{"input": "x" * 1000}]})
    # What changes something is answered whatever comes of it: nobody could ask again.
    assert [status for status, _ in await post(client, large, asked("/v1/agl/health"))] == [201, 200]
    answers = await post(client, asked("/v1/agl/rollouts"), asked("/v1/agl/health"), asked("/v1/agl/rollouts"))
    assert [status for status, _ in answers] == [413, 200, 413]


class Wire:
    """What a client sends, with answers that come when they are let through."""

    def __init__(self) -> None:
        self.alone: list[Asked] = []
        self.together: list[list[Asked]] = []
        self.open = asyncio.Event()
        self.sent = asyncio.Event()

    async def send_alone(self, call: Asked) -> Answered:
        self.alone.append(call)
        await asyncio.sleep(0)
        await self.open.wait()
        return Answered(200, 0.0, call.path.encode())

    async def send_together(self, calls: Any) -> Any:
        self.together.append(list(calls))
        self.sent.set()
        await asyncio.sleep(0)
        await self.open.wait()
        if any("fail" in call.path for call in calls):
            raise LightningError("it failed")
        return [
            RecordNotFoundError("none")
            if "none" in call.path
            else Answered(413 if "large" in call.path else 200, 0.0, call.path.encode())
            for call in calls
        ]


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait as long as it takes."""
    monkeypatch.setattr(client_together, "_LONGEST_WAIT_SECONDS", 60.0)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_hurry")
async def test_calls_that_come_while_another_is_on_its_way_go_together() -> None:
    wire = Wire()
    batches = CallBatches(wire.send_alone, wire.send_together)
    paths = ["a", "b", "none", "large", "c"]
    calls = [asyncio.create_task(batches.call(asked(path))) for path in paths]
    big = asyncio.create_task(batches.call(Asked("POST", "big", b"x" * 100_000, None)))
    given_up = asyncio.create_task(batches.call(asked("given up")))
    await turns()
    given_up.cancel()
    await turns()
    assert [call.path for call in wire.alone] == ["a", "big"]
    wire.open.set()
    answers = await asyncio.gather(*calls, big, return_exceptions=True)
    assert isinstance(answers.pop(2), RecordNotFoundError)
    assert [answer.body for answer in answers if isinstance(answer, Answered)] == [b"a", b"b", b"large", b"c", b"big"]
    assert [[call.path for call in batch] for batch in wire.together] == [["b", "none", "large", "c"]]
    assert [call.path for call in wire.alone] == ["a", "big", "large"]


@pytest.mark.usefixtures("no_hurry")
async def test_callers_that_go_on_at_once_go_together_again() -> None:
    wire = Wire()
    wire.open.set()
    batches = CallBatches(wire.send_alone, wire.send_together)

    async def caller() -> None:
        for number in range(4):
            await batches.call(asked(str(number)))

    await asyncio.gather(*(caller() for _ in range(8)))
    assert len(wire.alone) == 1
    assert sum(map(len, wire.together)) == 31
    assert max(map(len, wire.together)) >= 7
    assert len(wire.together) <= 8


async def test_a_slow_call_does_not_keep_others_waiting() -> None:
    wire = Wire()
    batches = CallBatches(wire.send_alone, wire.send_together)
    slow = asyncio.create_task(batches.call(asked("slow")))
    await turns()
    others = [asyncio.create_task(batches.call(asked(path))) for path in ("fail", "other")]
    async with asyncio.timeout(30):
        await wire.sent.wait()
    assert not slow.done()
    wire.open.set()
    found = await asyncio.gather(slow, *others, return_exceptions=True)
    assert [type(one) for one in found] == [Answered, LightningError, LightningError]
    assert (await batches.call(asked("after"))).body == b"after"


@pytest.mark.parametrize("body", [b"", b"{}\n{}\n", b"x\n\n", b'{"status":200}\n', b'{"status":200}\n\n' * 2])
def test_what_cannot_be_read_is_no_answer(body: bytes) -> None:
    with pytest.raises(LightningError):
        read_answers(body, 1)
