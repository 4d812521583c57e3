"""What a client's connection may cost, and where its requests end."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import pytest
import uvicorn

from lightning_api import connections
from lightning_api.app import create_app, service_of
from lightning_api.connections import HEAD_BYTES
from lightning_api.serve import LightningServer, run_in_loop
from lightning_api.settings import Settings

HOST = b"Host: service\r\n"
CLAIM = b"POST /v1/agl/queues/rollouts/dequeue HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = b'{"limit":0}'
LENGTH = b"Content-Length: 11\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"b\r\n" + BODY + b"\r\n0\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST


@contextmanager
def served(**settings: Any) -> Iterator[tuple[int, LightningServer]]:
    """A server as `lightning-sql serve` runs it, in a thread, and its port."""
    app = create_app(Settings(database_url="memory://", **settings))
    config = uvicorn.Config(app, http="httptools", log_config=None, lifespan="on", timeout_keep_alive=75)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    listening.setblocking(False)
    started = threading.Event()
    server = LightningServer(config, service_of(app), signals=(), started=started.set)
    thread = threading.Thread(target=lambda: run_in_loop(server.serve([listening])))
    thread.start()
    try:
        assert started.wait(30)
        yield listening.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served() as (port, _):
        yield port


class Client:
    """A connection that sends whatever it likes."""

    def __init__(self, port: int, *parts: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.received = b""
        self.send(*parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        with suppress(ConnectionError):  # the server may have ended it, with an answer on its way
            for part in parts:
                self.socket.sendall(part)

    def read(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionError:
            return b""

    def until(self, enough: Callable[[bytes], Any]) -> bytes:
        """What came, when it is enough or the connection ended."""
        while not enough(self.received) and (part := self.read()):
            self.received += part
        return self.received

    def to_the_end(self) -> bytes:
        return self.until(lambda _: False)


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def ask(port: int, request: bytes) -> list[int]:
    """The statuses that a request is answered with, if another one follows that ends the connection."""
    with Client(port, request, HEALTH + b"Connection: close\r\n\r\n") as client:
        return statuses(client.to_the_end())


@pytest.mark.parametrize(
    "request_",
    [
        CLAIM + LENGTH + b"\r\n" + BODY,
        CLAIM + CHUNKED + b"\r\n" + CHUNKS,
        CLAIM + b"Transfer-Encoding:\tchunked\r\n\r\n" + CHUNKS,
        CLAIM + CHUNKED + b"\r\nb;a=b\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n",
        CLAIM + LENGTH + b"X: " + b"x" * (HEAD_BYTES - 1000) + b"\r\n\r\n" + BODY,
        HEALTH + b"\r\n",
        b"GET /healthz?" + b"x" * (HEAD_BYTES - 1000) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
def test_requests_that_end_where_they_say(port: int, request_: bytes) -> None:
    assert ask(port, request_) == [200, 200]


@pytest.mark.parametrize(
    "request_",
    [
        CLAIM + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
        CLAIM + CHUNKED + b"Content-Length: 4\r\n\r\n" + CHUNKS,
        CLAIM + LENGTH + LENGTH + b"\r\n" + BODY,
        CLAIM + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
        CLAIM + b"Content-Length: 11, 11\r\n\r\n" + BODY,
        CLAIM + b"Content-Length: +11\r\n\r\n" + BODY,
        CLAIM + b"Content-Length: -1\r\n\r\n" + BODY,
        CLAIM + b"Content-Length: 0xb\r\n\r\n" + BODY,
        CLAIM + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
        CLAIM + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
        CLAIM + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
        CLAIM + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
        CLAIM + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
        CLAIM + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
        CLAIM + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
        (CLAIM + LENGTH + b"\r\n" + BODY).replace(b"\r\n", b"\n"),
        CLAIM + b"X: a\rY: b\r\n" + LENGTH + b"\r\n" + BODY,
        CLAIM + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
        CLAIM + CHUNKED + b"\r\n+b\r\n" + BODY + b"\r\n0\r\n\r\n",
        CLAIM + CHUNKED + b"\r\nfffffffffffffffff\r\n" + BODY + b"\r\n0\r\n\r\n",
        CLAIM + CHUNKED + b"\r\nb\n" + BODY + b"\n0\n\n",
        CLAIM + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"Content-Length: 4\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
def test_requests_whose_end_could_be_argued_about(port: int, request_: bytes) -> None:
    """What two servers could read differently is refused, and what follows it is not read at all."""
    assert ask(port, request_) == [400]


def test_nothing_follows_a_request_that_closes(port: int) -> None:
    with Client(port, HEALTH + b"Connection: close\r\n\r\n", CLAIM + LENGTH + b"\r\n" + BODY) as client:
        assert statuses(client.to_the_end()) == [200]


def test_what_stands_behind_a_body_is_no_header() -> None:
    token = b"Authorization: Bearer t\r\n"
    with served(token="t") as (port, _):
        assert ask(port, CLAIM + CHUNKED + b"\r\n" + CHUNKS[:-2] + token + b"\r\n") == [401, 200]
        assert ask(port, CLAIM + CHUNKED + token + b"\r\n" + CHUNKS) == [200, 200]


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"x" * HEAD_BYTES,
        b"X: " + b"x" * 4_000_000,
        b"X: x\r\n" * (HEAD_BYTES // 2),
        b"X: x\r\n" * 500_000,
    ],
)
@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
def test_large_heads(port: int, head: bytes, end: bytes) -> None:
    if not end and len(head) < 1_000_000:
        head *= 8
    with Client(port, HEALTH + head + end) as client:
        answer = client.to_the_end()
    assert statuses(answer) == [431]
    assert answer.endswith(b'{"detail":"The head of the request is too large"}')
    assert b"connection: close\r\n" in answer


@pytest.mark.parametrize(
    "rest",
    [
        b"b;" + b"x" * 4_000_000,
        CHUNKS[:-2] + b"X: " + b"x" * 4_000_000,
        CHUNKS[:-2] + b"X: x\r\n" * 1_000_000,
    ],
)
def test_what_is_neither_head_nor_body_is_limited_too(port: int, rest: bytes) -> None:
    with Client(port, CLAIM + CHUNKED + b"\r\n", rest) as client:
        assert statuses(client.to_the_end()) in ([431], [200])


def test_a_long_body_does_not_count_as_a_head(port: int) -> None:
    # Its answer is short: a client that sends more before it reads a long one waits for ever.
    spans = b"POST /v1/lightning/spans HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    body = b'{"spans":["' + b"x" * 5_000_000 + b'"]}'
    request = spans + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert ask(port, request + request) == [200, 200, 200]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience as short as a test's."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "TAKE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.3)
    monkeypatch.setattr("lightning_api.serve.SWEEP_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", [408]),
        (b"GET /healthz HT", [408]),
        (HEALTH, [408]),
        (HEALTH + b"\r\n" + HEALTH, [200, 408]),
        (CLAIM + LENGTH + b"\r\n", [408]),
        (CLAIM + LENGTH + b"\r\n{", [408]),
        (CLAIM + CHUNKED + b"\r\n" + CHUNKS[:5], [408]),
        # Answered before the body is complete, which nobody then waits for.
        (CLAIM + b"Content-Length: 999999999\r\n\r\n{", [413]),
    ],
)
def test_clients_that_say_no_more(sent: bytes, expected: list[int]) -> None:
    with served() as (port, _), Client(port, sent) as client:
        assert statuses(client.to_the_end()) == expected
        with Client(port, CLAIM + LENGTH + b"Connection: close\r\n\r\n" + BODY) as other:
            assert statuses(other.to_the_end()) == [200]


@pytest.mark.usefixtures("impatient")
def test_a_client_that_sends_line_ends_only() -> None:
    """They belong to no request, and end the timer that uvicorn has for an idle connection."""
    with served() as (port, _), Client(port, HEALTH + b"\r\n") as client:
        client.until(lambda received: received.endswith(b"}"))
        client.send(b"\r\n")
        assert statuses(client.to_the_end()) == [200]


@pytest.mark.usefixtures("impatient")
def test_a_client_that_drips_a_head() -> None:
    """Every byte is a sign of life, but a head may not take for ever."""
    with served() as (port, _), Client(port, HEALTH + b"X: ") as client:
        client.socket.settimeout(0.05)
        while True:
            client.send(b"x")
            with suppress(TimeoutError):
                part = client.read()
                client.received += part
                if not part:
                    break
        assert statuses(client.received) == [408]


@pytest.mark.usefixtures("impatient")
def test_a_client_that_goes_on_after_its_answer() -> None:
    """An endless body is dropped for a while, so that its sender reads why; then the connection is ended."""
    with served(body_limit=1000) as (port, _), Client(port, CLAIM + CHUNKED + b"\r\n") as client:
        chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
        client.socket.settimeout(0.02)
        while True:
            client.send(chunk)
            with suppress(TimeoutError):
                part = client.read()
                client.received += part
                if not part:
                    break
        assert statuses(client.received) == [413]


@pytest.mark.usefixtures("impatient")
def test_a_client_that_takes_nothing() -> None:
    body = b'{"input":"' + b"x" * 8_000_000 + b'"}'
    start = b"POST /v1/agl/rollouts HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    with served() as (port, server), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(start + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        begun = False
        while not begun or server.server_state.connections:
            # A server that waits for this client answers others.
            with Client(port, HEALTH + b"Connection: close\r\n\r\n") as other:
                assert statuses(other.to_the_end()) == [200]
            begun = begun or server.server_state.total_requests > 0


@pytest.mark.usefixtures("impatient")
def test_clients_that_wait_are_not_silent() -> None:
    """A long wait for an answer, and an idle connection that uvicorn's own timer looks after, stay."""
    wait = b'{"rollout_ids":["none"],"timeout":2}'
    request = b"POST /v1/agl/waits/rollouts HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n" % len(wait) + wait
    with served() as (port, _), Client(port, HEALTH + b"\r\n") as idle:
        idle.until(lambda received: received.endswith(b"}"))
        with Client(port, request) as client:
            assert statuses(client.until(lambda received: received.endswith(b"]"))) == [200]
        idle.send(HEALTH + b"Connection: close\r\n\r\n")
        assert statuses(idle.to_the_end()) == [200, 200]
