"""What is the HTTP client's own: errors, retries, ids that are hard to put into a path, long waits."""

import asyncio
import json
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from lightning_api import client_reads, client_transport
from lightning_api.app import create_app
from lightning_api.client import LightningClient
from lightning_api.client_claims import OpenClaims
from lightning_api.client_together import Asked
from lightning_api.settings import Settings
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    IdempotencyKeyReusedError,
    InvalidRequestError,
    LightningError,
    RecordNotFoundError,
    UnstorableValueError,
)
from lightning_sql.records import IdempotencyKey
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.testing.samples import make_span
from tests.backends import ServerThread

PATIENCE = 30.0


@pytest.fixture
async def client(server: ServerThread) -> AsyncIterator[LightningClient]:
    async with server.serving(CollectionStore(MemoryCollections(), scan_debounce_seconds=0)) as address:
        async with LightningClient(address) as client:
            yield client


Answers = list[tuple[int, Any]]


@asynccontextmanager
async def answering(
    answers: Answers, retry_seconds: float = 0.1
) -> AsyncIterator[tuple[LightningClient, list[web.Request]]]:
    """A client of a server that gives these answers one after the other, the last one for ever."""
    requests: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        requests.append(request)
        status, content = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.json_response(content, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        async with LightningClient(str(server.make_url("")), retry_seconds=retry_seconds) as client:
            yield client, requests


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_transport, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(client_transport, "_LONGEST_PAUSE_SECONDS", 0.02)


READS: list[Callable[[LightningClient], Awaitable[Any]]] = [
    lambda client: client.query_rollouts(),
    lambda client: client.query_attempts("ro-1"),
    lambda client: client.query_spans("ro-1"),
    lambda client: client.query_resources(),
    lambda client: client.query_workers(),
    lambda client: client.get_rollout_by_id("ro-1"),
    lambda client: client.get_latest_attempt("ro-1"),
    lambda client: client.get_resources_by_id("r"),
    lambda client: client.get_latest_resources(),
    lambda client: client.get_worker_by_id("w"),
    lambda client: client.statistics(),
    lambda client: client.wait_for_rollouts(rollout_ids=["ro-1"], timeout=0),
]
WRITES: list[Callable[[LightningClient], Awaitable[Any]]] = [
    lambda client: client.start_rollout(1),
    lambda client: client.enqueue_rollout(1),
    lambda client: client.dequeue_rollout(),
    lambda client: client.start_attempt("ro-1"),
    lambda client: client.update_rollout("ro-1", status="running"),
    lambda client: client.update_attempt("ro-1", "at-1", status="running"),
    lambda client: client.add_span(make_span("ro-1", "at-1", "s")),
    lambda client: client.get_next_span_sequence_id("ro-1", "at-1"),
    lambda client: client.add_resources({}),
    lambda client: client.update_resources("r", {}),
    lambda client: client.update_worker("w"),
]


NOT_NOW: Answers = [(503, {"detail": "not now"}), (502, "broken"), (500, {"detail": "Internal server error"})]


@pytest.mark.parametrize("number", range(len(READS)))
async def test_a_read_is_tried_again(number: int) -> None:
    async with answering(list(NOT_NOW), retry_seconds=PATIENCE) as (client, requests):
        with pytest.raises(LightningError, match="500"):
            await READS[number](client)
        assert len(requests) == 3


CREATING = ("/enqueue", "/dequeue", "/rollouts", "/attempts", "/resources", "/r", "/ro-1")
"""How paths end on which a repeat without a key would do something twice."""


@pytest.mark.parametrize("number", range(len(WRITES)))
async def test_a_write_is_made_again_under_its_key(number: int) -> None:
    async with answering([*NOT_NOW, *NOT_NOW], retry_seconds=PATIENCE) as (client, requests):
        for _ in range(2):
            with pytest.raises(LightningError, match="500"):
                await WRITES[number](client)
        assert len(requests) == 6
        keys = [request.headers.get("idempotency-key") for request in requests]
        assert (None not in keys) == requests[0].path.endswith(CREATING)
        # Of a claim whose answer never came, the next one takes the key.
        calls = 1 if requests[0].path.endswith("/dequeue") else 2
        assert len(set(keys)) == (calls if keys[0] else 1)


async def test_a_check_of_the_service_is_made_once() -> None:
    async with answering([(503, {"detail": "not now"})]) as (client, requests):
        with pytest.raises(DatabaseUnavailableError):
            await client.ping()
        assert len(requests) == 1


async def test_a_service_that_stays_away() -> None:
    async with answering([(503, {"detail": "not now"})], retry_seconds=0.3) as (client, _):
        with pytest.raises(DatabaseUnavailableError, match="not now"):
            await client.query_rollouts()


async def test_a_read_succeeds_once_the_service_is_back() -> None:
    page = {"items": [{"worker_id": "w"}], "limit": -1, "offset": 0, "total": 1}
    async with answering([(503, {}), (502, "broken"), (200, page)], retry_seconds=PATIENCE) as (client, requests):
        found = await client.query_workers()
        assert ([worker.worker_id for worker in found], found.total, len(requests)) == (["w"], 1, 3)


@pytest.mark.parametrize(
    ("status", "content", "error", "message"),
    [
        (400, {"detail": "limit is wrong"}, InvalidRequestError, "limit is wrong"),
        (422, {"detail": [{"loc": ["body", "input"], "msg": "Field required"}]}, InvalidRequestError, "body.input"),
        (404, {"detail": "no such thing"}, RecordNotFoundError, "no such thing"),
        (401, {"detail": "who are you"}, ConfigurationError, "token"),
        (413, {"detail": "too large"}, UnstorableValueError, "larger"),
        (408, {}, DatabaseUnavailableError, "408"),
        (504, {}, DatabaseUnavailableError, "504"),
        (500, {"detail": "Internal server error"}, LightningError, "500"),
        (418, "no JSON of ours", LightningError, "418"),
    ],
)
async def test_answers_become_errors(status: int, content: Any, error: type[Exception], message: str) -> None:
    async with answering([(status, content)]) as (client, _):
        with pytest.raises(error, match=message) as raised:
            await client.start_rollout(1)
        assert type(raised.value) is error


async def test_what_does_not_exist_is_none_for_reads_of_one_record() -> None:
    async with answering([(404, {"detail": "no"})]) as (client, _):
        assert await client.get_rollout_by_id("ro-1") is None
        assert await client.get_resources_by_id("r") is None
        assert await client.get_worker_by_id("w") is None


async def test_nobody_listens() -> None:
    async with LightningClient(f"http://127.0.0.1:{unused_port()}", retry_seconds=0.1) as client:
        with pytest.raises(DatabaseUnavailableError):
            await client.query_rollouts()
        with pytest.raises(DatabaseUnavailableError):
            await client.enqueue_rollout(1)


async def test_a_token() -> None:
    app = create_app(Settings(database_url="memory://", token="s3cret"), CollectionStore(MemoryCollections()))
    with ServerThread(app) as server:
        async with LightningClient(server.address, token="s3cret") as client:
            await client.enqueue_rollout(1)
            assert (await client.query_rollouts()).total == 1
        for token in (None, "wrong"):
            async with LightningClient(server.address, token=token) as stranger:
                with pytest.raises(ConfigurationError):
                    await stranger.query_rollouts()
                await stranger.ping()


async def test_ids_that_are_hard_to_put_into_a_path(client: LightningClient) -> None:
    ids = [
        "a b",
        "a?b=c&d",
        "a#b",
        "a%2Fb",
        "a%b",
        "ü\U0001f600",
        "a+b",
        "..a",
        "a;b",
        "latest",
        "search",
        "a\\b",
        "'\"",
    ]
    for identifier in ids:
        if identifier != "search":
            await client.update_worker(identifier, {"id": identifier})
            worker = await client.get_worker_by_id(identifier)
            assert worker is not None
            assert worker.heartbeat_stats == {"id": identifier}
        await client.update_resources(identifier, {})
        resources = await client.get_resources_by_id(identifier)
        assert resources is not None
        assert resources.resources_id == identifier
    assert [worker.worker_id for worker in await client.query_workers()] == [i for i in ids if i != "search"]
    assert [item.resources_id for item in await client.query_resources()] == ids
    for identifier in ("", ".", "..", "a/b", "/", "\ud800"):
        assert await client.get_worker_by_id(identifier) is None
        assert await client.get_resources_by_id(identifier) is None
        assert await client.get_rollout_by_id(identifier) is None
        with pytest.raises(InvalidRequestError):
            await client.update_worker(identifier)
        with pytest.raises(InvalidRequestError):
            await client.update_resources(identifier, {})
    with pytest.raises(InvalidRequestError):
        await client.update_worker("search")


async def test_a_worker_whose_id_is_no_path_can_still_be_read(client: LightningClient) -> None:
    await client.start_rollout(1, worker_id="host/1")
    worker = await client.get_worker_by_id("host/1")
    assert worker is not None
    assert worker.status == "busy"


@pytest.mark.parametrize("number", [2**62, 2**63, -(2**63) - 1, 2**80])
async def test_a_number_that_would_exhaust_the_counter_is_refused(client: LightningClient, number: int) -> None:
    started = await client.start_rollout(1)
    key = (started.rollout_id, started.attempt.attempt_id)
    with pytest.raises(InvalidRequestError):
        await client.add_span(make_span(*key, "s").model_copy(update={"sequence_id": number}))
    assert (await client.query_spans(key[0])).total == 0
    assert await client.get_next_span_sequence_id(*key) == 1


async def test_an_import_goes_on_after_an_attempt_that_does_not_exist(client: LightningClient) -> None:
    started = await client.start_rollout(1)
    key = (started.rollout_id, started.attempt.attempt_id)
    with pytest.raises(RecordNotFoundError):
        await client.add_many_spans([make_span(*key, "a"), make_span("ro-x", "at-x", "b"), make_span(*key, "c")])
    offered = [make_span(*key, "a"), make_span("ro-x", "at-x", "b"), make_span(*key, "c"), make_span(*key, "d")]
    receipt = await client.import_spans(offered)
    assert [span.span_id for span in receipt.stored] == ["d"]
    assert receipt.duplicates == 2
    assert [span.span_id for span in receipt.rejected] == ["b"]


async def test_a_long_wait_is_made_of_short_requests(client: LightningClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_reads, "_WAIT_SECONDS", 0.1)
    one, other = await client.start_rollout(1), await client.start_rollout(2)
    ids = [one.rollout_id, "ro-unknown", other.rollout_id]
    await client.update_attempt(one.rollout_id, "latest", status="succeeded")
    assert [item.input for item in await client.wait_for_rollouts(rollout_ids=ids, timeout=0.35)] == [1]
    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=ids))
    await asyncio.sleep(0.35)
    assert not waiting.done()
    await client.update_attempt(other.rollout_id, "latest", status="failed")
    async with asyncio.timeout(PATIENCE):
        assert [item.input for item in await waiting] == [1, 2]


async def test_a_pickled_client_works(client: LightningClient) -> None:
    await client.enqueue_rollout(1)
    async with pickle.loads(pickle.dumps(client)) as copy:
        assert (await copy.query_rollouts()).total == 1


async def test_a_closed_client_opens_again(client: LightningClient) -> None:
    await client.enqueue_rollout(1)
    await client.close()
    assert (await client.query_rollouts()).total == 1


async def test_what_has_no_json_form_is_refused(client: LightningClient) -> None:
    with pytest.raises(InvalidRequestError):
        await client.enqueue_rollout({"a": object()})
    assert (await client.query_rollouts()).total == 0


# Answers that get lost


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose next answer is lost, each once; the request takes place."""
    lost: list[str] = []
    request = client_transport.Transport._request

    async def lossy(self: Any, asked: Asked, *rest: Any) -> Any:
        answer = await request(self, asked, *rest)
        if asked.path in lost:
            lost.remove(asked.path)
            raise client_transport._UnavailableError("the answer was lost")
        return answer

    monkeypatch.setattr(client_transport.Transport, "_request", lossy)
    return lost


DEQUEUE = "/v1/agl/queues/rollouts/dequeue"


async def test_a_call_whose_answer_is_lost_takes_place_once(client: LightningClient, losing: list[str]) -> None:
    losing += ["/v1/agl/queues/rollouts/enqueue", DEQUEUE, "/v1/agl/rollouts", "/v1/agl/resources"]
    queued = await client.enqueue_rollout("queued")
    claimed = await client.dequeue_rollout("w")
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    assert await client.dequeue_rollout("w") is None
    started = await client.start_rollout("started")
    resources = await client.add_resources({})
    losing += [f"/v1/agl/rollouts/{started.rollout_id}/attempts", f"/v1/agl/resources/{resources.resources_id}"]
    assert (await client.start_attempt(started.rollout_id)).attempt.sequence_id == 2
    assert (await client.update_resources(resources.resources_id, {})).version == 2
    assert losing == []
    assert (await client.query_rollouts()).total == 2
    assert (await client.query_resources()).total == 1


async def test_a_span_whose_answer_is_lost_is_answered_as_stored(client: LightningClient, losing: list[str]) -> None:
    started = await client.start_rollout(1)
    key = (started.rollout_id, started.attempt.attempt_id)
    span = make_span(*key, "s", 1, attributes={"nan": float("nan"), "a": [1, -0.0]})
    losing += ["/v1/agl/spans"]
    assert await client.add_span(span) is span
    losing += ["/v1/agl/spans"]
    assert await client.add_span(make_span(*key, "s", 2)) is None  # another one, which was not stored
    assert await client.add_span(span) is None
    losing += ["/v1/lightning/spans"]
    many = [make_span(*key, "s", 1), make_span(*key, "t", 2)]
    assert [stored.span_id for stored in (await client.import_spans(many)).stored] == ["t"]
    assert losing == []
    assert (await client.query_spans(key[0])).total == 2


async def given_up(client: LightningClient, losing: list[str]) -> None:
    """Claim, lose the answer, and go away before the call is made again."""
    losing.append(DEQUEUE)
    claim = asyncio.create_task(client.dequeue_rollout("w"))
    while losing:  # noqa: ASYNC110 - the very next step of the client shall not take place
        await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim


async def test_a_claim_that_was_given_up_is_answered_by_the_next(client: LightningClient, losing: list[str]) -> None:
    for number in range(3):
        await client.enqueue_rollout(number)
    await given_up(client, losing)
    other = await client.dequeue_rollout("v")
    assert other is not None
    assert other.input == 1
    claimed = [await client.dequeue_rollout("w"), await client.dequeue_rollout("w")]
    assert [rollout and rollout.input for rollout in claimed] == [0, 2]


async def test_a_claim_that_was_given_up_and_is_over_is_not_worked_on(
    client: LightningClient, losing: list[str]
) -> None:
    await client.enqueue_rollout(0)
    await client.enqueue_rollout(1)
    await given_up(client, losing)
    [lost, _] = await client.query_rollouts()
    await client.update_attempt(lost.rollout_id, "latest", status="failed")
    claimed = await client.dequeue_rollout("w")
    assert claimed is not None
    assert claimed.input == 1


async def test_a_claim_that_takes_place_late_is_answered_by_the_next(
    client: LightningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try was still on its way when the second one found nothing."""
    request = client_transport.Transport._request
    late: list[tuple[Any, ...]] = []

    async def slow(self: Any, *rest: Any) -> Any:
        if rest[0].path == DEQUEUE and not late:
            late.append(rest)
            raise client_transport._UnavailableError("no answer yet")
        return await request(self, *rest)

    monkeypatch.setattr(client_transport.Transport, "_request", slow)
    assert await client.dequeue_rollout("w") is None
    await client.enqueue_rollout("late")
    [taken] = json.loads((await request(client._transport, *late[0])).body)
    found = await client.dequeue_rollout("w")
    assert found is not None
    assert found.attempt.attempt_id == taken["attempt"]["attempt_id"]
    assert await client.dequeue_rollout("w") is None


async def test_a_claim_that_is_over_before_its_repeat_is_not_worked_on(
    client: LightningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = client_transport.Transport._request
    lost: list[Any] = []

    async def lossy(self: Any, asked: Asked, *rest: Any) -> Any:
        answer = await request(self, asked, *rest)
        if asked.path == DEQUEUE and not lost:
            lost.extend(json.loads(answer.body))
            await client.update_attempt(lost[0]["rollout_id"], lost[0]["attempt"]["attempt_id"], status="failed")
            raise client_transport._UnavailableError("the answer was lost")
        return answer

    monkeypatch.setattr(client_transport.Transport, "_request", lossy)
    for number in range(2):
        await client.enqueue_rollout(number)
    claimed = await client.dequeue_rollout("w")
    assert claimed is not None
    assert (lost[0]["input"], claimed.input) == (0, 1)


async def test_the_latest_attempt_is_changed_once() -> None:
    async with answering(list(NOT_NOW), retry_seconds=PATIENCE) as (client, requests):
        with pytest.raises(DatabaseUnavailableError):
            await client.update_attempt("ro-1", "latest", status="failed")
        assert len(requests) == 1


@pytest.mark.parametrize("wait", [0.0, 5.0])
async def test_a_claim_that_waited_for_longer_is_answered_by_the_next(
    client: LightningClient, losing: list[str], wait: float
) -> None:
    losing.append(DEQUEUE)
    claim = asyncio.create_task(client.dequeue_rollout("w", wait=20))
    await asyncio.sleep(0.1)
    await client.enqueue_rollout("first")
    while losing:  # noqa: ASYNC110 - the very next step of the client shall not take place
        await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await client.enqueue_rollout("second")
    claimed = [await client.dequeue_rollout("w", wait=wait) for _ in range(2)]
    assert [rollout and rollout.input for rollout in claimed] == ["first", "second"]


async def test_a_claim_under_a_key_may_be_repeated_with_another_wait(client: LightningClient) -> None:
    for number in range(2):
        await client.enqueue_rollout(number)
    key = IdempotencyKey("k")
    claimed = [await client.dequeue_rollout("w", wait=wait, idempotency_key=key) for wait in (0.0, 5.0, 1.0)]
    assert [rollout and rollout.input for rollout in claimed] == [0, 0, 0]
    with pytest.raises(IdempotencyKeyReusedError):
        await client.dequeue_rollout("v", idempotency_key=key)


async def test_a_claim_is_remembered_whoever_comes_back_with_nothing(
    client: LightningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two claims of one worker, the one whose answer is lost was served, and the other one ends meanwhile."""
    request = client_transport.Transport._request
    served, held = asyncio.Event(), asyncio.Event()
    first = True

    async def holding(self: Any, asked: Asked, *rest: Any) -> Any:
        nonlocal first
        mine, first = asked.path == DEQUEUE and first, False
        answer = await request(self, asked, *rest)
        if mine:
            served.set()
            await held.wait()
        return answer

    await client.enqueue_rollout("lost")
    monkeypatch.setattr(client_transport.Transport, "_request", holding)
    async with LightningClient(client._transport.base_url) as other:
        claim = asyncio.create_task(other.dequeue_rollout("w"))
        await served.wait()
        assert await other.dequeue_rollout("w") is None
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        found = await other.dequeue_rollout("w")
        assert found is not None
        assert found.input == "lost"


async def test_what_a_client_remembers_is_not_for_its_copies(client: LightningClient, losing: list[str]) -> None:
    await client.enqueue_rollout("lost")
    await given_up(client, losing)
    async with pickle.loads(pickle.dumps(client)) as copied:
        assert await copied.dequeue_rollout("w") is None
    found = await client.dequeue_rollout("w")
    assert found is not None
    assert found.input == "lost"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_what_a_client_remembers_is_not_for_its_children() -> None:
    claims = OpenClaims()
    claims.put(1, "w", "key")
    child = os.fork()
    if not child:
        os._exit(0 if claims.take(1, "w") is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [claims.take(1, "w"), claims.take(1, "w")] == ["key", None]
