"""What a process takes on at once is bounded, and what it takes no more is refused without harm."""

import asyncio
import errno
import http.client
import json
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from lightning_api import accepting
from lightning_api.accepting import Acceptor, most_connections
from lightning_api.app import create_app, service_of
from lightning_api.load import CLAIM_PATH, Calls, Load
from lightning_api.serve import bind_sockets
from lightning_api.settings import Settings
from lightning_sql.errors import OverloadedError
from tests.api.fakes import PagesOfSpans, StoreOfRows, span_row
from tests.faults.stage import until

V1 = "/v1/agl"
REFUSED = {"detail": "Too many calls wait already; try again"}
LARGE = "x" * 800


class SlowStore(StoreOfRows):
    """A store whose calls go on until they are let go."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begun = 0
        self.may_end = asyncio.Event()

    async def ping(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        async def call(*_arguments: Any, **_options: Any) -> Any:
            self.begun += 1
            await self.may_end.wait()
            return []

        return call


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def busy(client: Any, store: SlowStore, count: int, **request: Any) -> AsyncIterator[None]:
    """While so many calls are worked on; all of them must be answered in the end."""
    calls = [asyncio.create_task(client.request(**request)) for _ in range(count)]
    await settled()
    try:
        yield
    finally:
        store.may_end.set()
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} <= {200, 201}


READ = {"method": "GET", "url": f"{V1}/statistics"}
ENQUEUE = {"method": "POST", "url": f"{V1}/queues/rollouts/enqueue", "json": {"rollouts": [{"input": LARGE}]}}
WAIT = {"method": "POST", "url": f"{V1}/waits/rollouts", "json": {"rollout_ids": ["r"]}}


@pytest.mark.parametrize("request_", [READ, ENQUEUE], ids=["read", "enqueue"])
async def test_more_calls_than_a_process_works_on(serve: Any, request_: Any) -> None:
    store = SlowStore()
    client = await serve(store=store, max_requests=3)
    async with busy(client, store, 3, **request_):
        for path in (f"{V1}/rollouts", f"{V1}/rollouts/r/attempts", f"{V1}/statistics", f"{V1}/nowhere"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, REFUSED, "1")
        answer = await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]})
        assert (answer.status_code, answer.json()) == (503, REFUSED)
        answer = await client.get("/v1/lightning/rollouts")
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.status_code, answer.json()["status"], answer.headers["retry-after"]) == (503, 503, "1")
        answer = await client.post("/v1/traces", content=b"", headers={"content-type": "application/x-protobuf"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        for path in (f"{V1}/health", "/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
        assert store.begun == 3
    assert (await client.get(f"{V1}/statistics")).status_code == 200


CLAIM = {"method": "POST", "url": f"{V1}/queues/rollouts/dequeue", "json": {"limit": 1}}


async def test_claims_are_refused_before_what_ends_work(serve: Any) -> None:
    store = SlowStore()
    client = await serve(store=store, max_requests=8)
    async with busy(client, store, 5, **READ), busy(client, store, 1, **CLAIM):
        answer = await client.request(**CLAIM)
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, REFUSED, "1")
        assert store.begun == 6
        async with busy(client, store, 2, **ENQUEUE):
            assert store.begun == 8
            assert (await client.request(**ENQUEUE)).status_code == 503
    assert (await client.request(**CLAIM)).status_code == 200


def test_claims_are_refused_early_too() -> None:
    """As a connection does it, which does not ask the application."""
    load = Load(8, 1000)
    for _ in range(5):
        load.calls.take()
    assert not load.is_nearly_full
    load.calls.take()
    assert load.is_nearly_full
    assert not load.will_be_full
    assert load.is_full(CLAIM_PATH)
    assert not load.is_full(f"{V1}/queues/rollouts/enqueue")
    load.calls.take()
    load.calls.take()
    assert load.will_be_full
    assert load.is_full(f"{V1}/queues/rollouts/enqueue")


async def test_waits_take_no_place(serve: Any) -> None:
    store = SlowStore()
    client = await serve(store=store, max_requests=2)
    async with busy(client, store, 20, **WAIT):
        async with busy(client, store, 1, **ENQUEUE):
            assert store.begun == 21


async def test_waits_are_served_beside_as_many_calls_as_may_be(serve: Any) -> None:
    store = SlowStore()
    client = await serve(store=store, max_requests=2)
    async with busy(client, store, 2, **ENQUEUE), busy(client, store, 5, **WAIT):
        assert store.begun == 7


async def test_bodies_may_be_so_large_together(serve: Any) -> None:
    store = SlowStore()
    client = await serve(store=store, body_limit=1000, max_request_bytes=1)  # so that two find room
    async with busy(client, store, 2, **ENQUEUE):
        answer = await client.request(**ENQUEUE)
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, REFUSED, "1")
        small = asyncio.create_task(client.get(f"{V1}/statistics"))
        await settled()
        assert store.begun == 3
    assert (await small).status_code == 200
    assert (await client.request(**ENQUEUE)).status_code == 201


class Connection:
    """One request to an application, whose body comes when the test says so."""

    def __init__(self, store: Any, path: str, *, method: str = "POST", **settings: Any) -> None:
        self.app = create_app(Settings(database_url="memory://", **settings), store)
        self.load = service_of(self.app).load
        self.parts: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        self._scope: Any = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"rollout_id=r" if method == "GET" else b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    def say(self, body: bytes, *, more: bool) -> None:
        self.parts.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def serve(self) -> int:
        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(cast(Any, self._scope), self.parts.get, send)
        return self.sent[0]["status"]


async def test_who_sends_slowly_takes_no_place() -> None:
    store = SlowStore()
    connection = Connection(cast(Any, store), f"{V1}/queues/rollouts/enqueue")
    serving = asyncio.create_task(connection.serve())
    await settled()
    connection.say(b'{"rollouts": [', more=True)
    await settled()
    assert (connection.load.calls.taken, connection.load.bytes) == (0, 14)
    connection.say(b"{}]}", more=False)
    await settled()
    store.may_end.set()
    assert await serving == 422
    assert (connection.load.calls.taken, connection.load.bytes) == (0, 0)


async def test_a_place_that_is_gone_when_the_body_is_there() -> None:
    store = SlowStore()
    connection = Connection(cast(Any, store), f"{V1}/queues/rollouts/enqueue", max_requests=1)
    serving = asyncio.create_task(connection.serve())
    await settled()
    connection.load.calls.take()
    connection.say(json.dumps({"rollouts": [{"input": 1}]}).encode(), more=False)
    assert await serving == 503
    assert store.begun == 0
    assert (connection.load.calls.taken, connection.load.bytes) == (1, 0)


async def test_so_many_large_answers_are_on_their_way() -> None:
    rows = PagesOfSpans([[span_row(number)] for number in range(3)])
    connection = Connection(cast(Any, StoreOfRows(rows)), f"{V1}/spans", method="GET")
    for _ in range(connection.load.downloads.most):
        connection.load.downloads.take()
    assert await connection.serve() == 503
    assert rows.read == 0
    connection.load.downloads.give_back()
    connection.sent.clear()
    assert await connection.serve() == 200
    assert connection.load.downloads.taken == connection.load.downloads.most - 1
    assert connection.load.calls.taken == 0


# A server


@pytest.fixture
def full_server(start_server: Any, sqlite_url: str) -> Any:
    """A server that works on one call, and does not get any further, until its file is unlocked."""
    server = start_server(
        "--database-url", sqlite_url, "--max-requests", "1", "--scan-debounce-seconds", "1000"
    ).ready()
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(file, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as first:
            body = json.dumps({"rollouts": [{"input": 1}]})
            first.request("POST", f"{V1}/queues/rollouts/enqueue", body, {"content-type": "application/json"})
            yield server
            lock.execute("COMMIT")
            response = first.getresponse()
            assert response.status == 201
            response.read()
            first.request("GET", f"{V1}/statistics")
            assert json.loads(first.getresponse().read())["total_rollouts"] == 1


def test_a_connection_goes_on_after_a_refusal(full_server: Any, eventually: Any) -> None:
    eventually(lambda: full_server.call("GET", f"{V1}/rollouts")[0] == 503)
    with closing(http.client.HTTPConnection("127.0.0.1", full_server.port, timeout=60)) as connection:
        for path, body in (
            (f"{V1}/rollouts", None),
            (f"{V1}/queues/rollouts/enqueue", b'{"rollouts": [{"input": "' + b"x" * 3_000_000 + b'"}]}'),
            (f"{V1}/rollouts/r%20r", None),
            ("/v1/lightning/rollouts?limit=1", None),
        ):
            connection.request("GET" if body is None else "POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert "Too many calls" in json.loads(response.read())["detail"]
            connection.request("GET", f"{V1}/health")
            assert json.loads(connection.getresponse().read()) == {"status": "ok"}
        # A page is told that it may not read the answer, which takes the application's own way.
        connection.request("GET", f"{V1}/rollouts", headers={"origin": "https://a.example"})
        assert connection.getresponse().status == 503


def test_requests_that_come_at_once_on_one_connection_are_all_answered(full_server: Any, eventually: Any) -> None:
    eventually(lambda: full_server.call("GET", f"{V1}/rollouts")[0] == 503)
    line = f"GET {V1}/rollouts HTTP/1.1\r\nhost: a\r\n".encode()
    with socket.create_connection(("127.0.0.1", full_server.port), timeout=60) as connection:
        connection.sendall(3 * (line + b"\r\n") + f"GET {V1}/health HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        connection.sendall(line + b"connection: close\r\n\r\n")
        answers = connection.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 503 ") == 4
    assert answers.count(b"HTTP/1.1 200 ") == 1


class Work:
    """Calls that end and are followed by others, at some speed."""

    def __init__(self, most: int, few: int) -> None:
        self.now = 0.0
        self.calls = Calls(most, few, clock=lambda: self.now)

    def go_on(self, seconds: float, per_second: float) -> None:
        for _ in range(int(seconds * per_second)):
            self.now += 1 / per_second
            self.calls.give_back()
            self.calls.taken += 1

    def are_full(self, taken: int) -> bool:
        return self.calls.are_full_with(taken - self.calls.taken)


def test_as_many_calls_are_worked_on_as_end_in_a_second() -> None:
    work = Work(most=2000, few=100)
    for _ in range(1999):
        work.calls.take()
    assert not work.calls.are_full
    work.go_on(1.0, per_second=400)
    assert work.calls.are_full
    with pytest.raises(OverloadedError):
        work.calls.take()
    assert not work.are_full(390)
    assert work.are_full(410)
    work.go_on(2.0, per_second=20)  # a few may always be worked on
    assert not work.are_full(99)
    assert work.are_full(100)
    work.go_on(1.0, per_second=4000)  # they are fast again
    assert not work.are_full(1999)
    assert work.are_full(2000)


def test_a_pause_is_not_yet_slowness() -> None:
    work = Work(most=2000, few=100)
    for _ in range(1000):
        work.calls.take()
    work.go_on(1.0, per_second=1200)
    work.now += 0.6
    work.go_on(0.1, per_second=1200)
    assert not work.are_full(1150)
    work.now += 3.0  # it may be slow all the same
    assert work.are_full(1250)
    work.now += 30.0  # nothing ends at all
    assert not work.are_full(1999)
    assert work.are_full(2000)
    work.go_on(0.1, per_second=1200)
    assert not work.are_full(1150)
    assert work.are_full(1250)


def test_calls_that_come_one_after_the_other_say_nothing() -> None:
    work = Work(most=2000, few=100)
    work.calls.take()
    work.go_on(100.0, per_second=1)
    assert not work.are_full(1999)


# Connections


class Listening:
    """A socket that listens, and who wants to be let in."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.socket = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        self.socket.setblocking(False)
        self.open: set[asyncio.Protocol] = set()
        self._stack = stack

    def connect(self, count: int) -> list[socket.socket]:
        address = self.socket.getsockname()
        return [self._stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)]

    def protocol(self) -> asyncio.Protocol:
        opened = self.open

        class Noted(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                opened.add(self)

        return Noted()


def in_uvloop(play: Callable[[Listening], Any]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await play(Listening(stack))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_all_who_wait_are_let_in_at_once() -> None:
    async def play(listening: Listening) -> None:
        waiting = listening.connect(200)
        acceptor = Acceptor(listening.socket, listening.protocol, listening.open, 1000)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(listening.open) == len(waiting)
        acceptor.close()
        await acceptor.wait_closed()

    in_uvloop(play)


def test_more_connections_than_a_process_can_have() -> None:
    async def play(listening: Listening) -> None:
        waiting = listening.connect(5)
        acceptor = Acceptor(listening.socket, listening.protocol, listening.open, 3)
        answers = [await asyncio.to_thread(refused.recv, 1000) for refused in waiting[3:]]
        for answer in answers:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert b"content-length: %d" % len(body) in head
            assert json.loads(body) == {"detail": "Too many connections are open; try again"}
        assert len(listening.open) == 3
        acceptor.close()

    in_uvloop(play)


def test_no_more_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(accepting, "PAUSE_SECONDS", 0.01)

    class Short:
        """A socket whose process has no file left for a connection, at first."""

        def __init__(self, listening: socket.socket) -> None:
            self._listening = listening
            self.fileno = listening.fileno
            self.failures = 2

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listening.accept()

    async def play(listening: Listening) -> None:
        listening.connect(4)
        acceptor = Acceptor(cast(Any, Short(listening.socket)), listening.protocol, listening.open, 1000)
        await until(lambda: len(listening.open) == 4)
        acceptor.close()

    in_uvloop(play)
    assert "no connection can be taken in for now: Too many open files" in caplog.text


def test_who_takes_nothing_is_cut_off_in_the_end() -> None:
    [listening] = bind_sockets(Settings(port=0))
    with listening, socket.create_connection(listening.getsockname(), timeout=60):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_process_may_have_some_connections() -> None:
    assert 1 <= most_connections() <= accepting.MOST_CONNECTIONS
    assert most_connections() == most_connections()
