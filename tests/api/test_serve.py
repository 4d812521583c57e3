"""Real servers: they start, stop, answer who waits, and are several processes if asked to be."""

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import httpx
import psutil
import pytest

from lightning_api.app import create_app, create_app_from_environment, service_of
from lightning_api.settings import Settings
from lightning_sql.errors import DatabaseUnavailableError
from lightning_sql.store.interface import LightningStore

pytestmark = pytest.mark.slow

V1 = "/v1/agl"
JSON = {"Content-Type": "application/json"}
Start = Callable[..., Any]


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; what it returns is appended to the list."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def stop_signal(request: pytest.FixtureRequest) -> signal.Signals:
    return request.param


def test_a_stop_is_clean(start_server: Start, stop_signal: signal.Signals) -> None:
    server = start_server("--database-url", "memory://").ready()
    assert server.call("GET", f"{V1}/health") == (200, {"status": "ok"})
    server.signal(stop_signal)
    assert server.wait() == 0
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]
    assert server.lines[-1].endswith("stopped")


def test_what_was_stored_is_there_after_a_restart(start_server: Start, sqlite_url: str) -> None:
    first = start_server("--database-url", sqlite_url).ready()
    _, rollout = first.call("POST", f"{V1}/rollouts", {"input": {"a": [1, 2.5, None]}})
    _, before = first.call("GET", f"{V1}/rollouts")
    first.kill()
    second = start_server("--database-url", sqlite_url).ready()
    assert second.call("GET", f"{V1}/rollouts") == (200, before)
    assert before["items"] == [rollout]


def test_waiting_callers_are_answered_when_the_server_stops(start_server: Start, stop_signal: signal.Signals) -> None:
    server = start_server("--database-url", "memory://").ready()
    _, finished = server.call("POST", f"{V1}/rollouts", {"input": 1})
    _, unfinished = server.call("POST", f"{V1}/rollouts", {"input": 2})
    _, finished = server.call("POST", f"{V1}/rollouts/{finished['rollout_id']}", {"status": "succeeded"})
    ids = [finished["rollout_id"], unfinished["rollout_id"]]
    connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(5)]
    for connection in connections:
        connection.request("POST", f"{V1}/waits/rollouts", json.dumps({"rollout_ids": ids, "timeout": None}), JSON)
    # Answered in order of arrival, so the waits have begun by now.
    assert server.call("GET", f"{V1}/statistics")[0] == 200
    server.signal(stop_signal)
    for connection in connections:
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())) == (200, [finished])
        connection.close()
    assert server.wait() == 0


def test_a_request_in_flight_is_finished(start_server: Start) -> None:
    server = start_server("--database-url", "memory://").ready()
    body = json.dumps({"input": "slow"}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {V1}/rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        assert server.call("GET", f"{V1}/health")[0] == 200
        server.signal(signal.SIGTERM)
        # The listening socket closes first, and only then does the request go on.
        while True:
            try:
                socket.create_connection(("127.0.0.1", server.port)).close()
            except ConnectionError:
                break
        connection.sendall(body[5:])
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 201 ")
    assert server.wait() == 0


@pytest.mark.parametrize("has_rows", [False, True])
async def test_a_client_that_hangs_up_stops_its_wait(has_rows: bool) -> None:
    waiting, stopped = asyncio.Event(), asyncio.Event()

    class Waiting:
        recorder = None

        @property
        def rows(self) -> Any:
            return self if has_rows else None

        async def finished_rows(self, _rollout_ids: Any, _timeout: Any) -> Any:
            assert has_rows
            await self.wait()

        async def wait_for_rollouts(self, **_options: Any) -> Any:
            assert not has_rows
            await self.wait()

        async def wait(self) -> None:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

    async def receive() -> Any:
        if not waiting.is_set() and not sent:
            sent.append("the body")
            return {"type": "http.request", "body": b'{"rollout_ids": ["r"]}', "more_body": False}
        await waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    app = create_app(Settings(), cast(LightningStore, Waiting()))
    path = f"{V1}/waits/rollouts"
    scope: Any = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    assert stopped.is_set()
    assert sent == ["the body"]


def test_a_large_body_is_refused_without_breaking_the_connection(start_server: Start) -> None:
    server = start_server("--database-url", "memory://", "--body-limit", "1000").ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        for _ in range(2):
            connection.request("POST", f"{V1}/rollouts", b'{"input": "' + b"x" * 20_000_000 + b'"}', JSON)
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())) == (413, {"detail": "The body is too large"})
        connection.request("GET", f"{V1}/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
    finally:
        connection.close()


def test_options_reach_the_service(start_server: Start) -> None:
    server = start_server(
        "--database-url",
        "memory://",
        "--cors-origin",
        "https://a",
        "--cors-origin",
        "https://b",
        LIGHTNING_SQL_TOKEN="t",
    ).ready()
    assert server.call("GET", f"{V1}/workers")[0] == 401
    assert server.call("GET", f"{V1}/workers", Authorization="Bearer t")[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"{V1}/health", headers={"Origin": "https://b"})
    assert connection.getresponse().headers["access-control-allow-origin"] == "https://b"
    connection.close()
    assert "secret" not in "\n".join(server.lines)


def test_ipv6(start_server: Start) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
    server = start_server("--database-url", "memory://", "--host", "::1").ready()
    connection = http.client.HTTPConnection("::1", server.port, timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
def test_several_workers(
    start_server: Start, eventually: Any, stop_signal: signal.Signals, database: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(database)
    server = start_server("--database-url", url, "--workers", "2").ready()
    parent = psutil.Process(server.process.pid)

    def workers() -> set[int]:
        """The children that serve, which the resource tracker of `multiprocessing` does not."""
        found: set[int] = set()
        for child in parent.children():
            with suppress(psutil.NoSuchProcess):  # a zombie is one, too
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found.add(child.pid)
        return found

    before = workers()
    assert len(before) == 2
    for number in range(20):
        assert server.call("POST", f"{V1}/rollouts", {"input": number})[0] == 201
    assert server.call("GET", f"{V1}/rollouts")[1]["total"] == 20
    killed = before.copy().pop()
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: len(workers() - {killed}) == 2)
    assert server.call("GET", f"{V1}/rollouts")[1]["total"] == 20
    _, rollout = server.call("POST", f"{V1}/rollouts", {"input": "waited for"})
    body = {"rollout_ids": [rollout["rollout_id"]], "timeout": None}
    waiting, answers = in_background(lambda: server.call("POST", f"{V1}/waits/rollouts", body))
    eventually(lambda: server.call("GET", f"{V1}/statistics")[0] == 200)
    server.signal(stop_signal)
    assert server.wait() == 0
    waiting.join(60)
    assert answers in ([(200, [])], [])
    assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.slow
def test_workers_end_with_their_parent(start_server: Start, eventually: Any, sqlite_url: str) -> None:
    server = start_server("--database-url", sqlite_url, "--workers", "2").ready()
    children = psutil.Process(server.process.pid).children()
    server.signal(signal.SIGKILL)
    server.process.wait(60)
    eventually(
        lambda: not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    )


async def test_the_application_opens_and_closes_its_own_store() -> None:
    app = create_app(Settings(database_url="memory://"))
    service = service_of(app)
    with pytest.raises(RuntimeError):
        _ = service.store
    async with app.lifespan():
        await service.store.enqueue_rollout(1)
        assert not service.draining
    assert service.draining
    assert service.current_store is None


def test_the_factory_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SQL_DATABASE_URL", "memory://")
    monkeypatch.setenv("LIGHTNING_SQL_PARTITION", "elsewhere")
    assert service_of(create_app_from_environment()).settings.partition == "elsewhere"


async def test_the_watchdog_looks_while_nobody_calls(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweeps = asyncio.Queue[int]()
    outcomes = iter([RuntimeError("first"), DatabaseUnavailableError("second"), None, None])

    class Sweeping:
        recorder = None

        async def sweep(self) -> int:
            sweeps.put_nowait(1)
            outcome = next(outcomes, None)
            if outcome is not None:
                raise outcome
            return 0

        async def release_waiters(self) -> None:
            pass

    monkeypatch.setattr("lightning_api.app._LEAST_SWEEP_SECONDS", 0.001)
    caplog.set_level(logging.WARNING)
    await serve(store=Sweeping(), scan_debounce_seconds=0.0)
    for _ in range(4):
        await asyncio.wait_for(sweeps.get(), 60)
    assert "RuntimeError: first" in caplog.text
    assert "try again: second" in caplog.text


async def test_readiness_follows_the_store() -> None:
    class Pinged:
        recorder = None

        failing = False

        async def ping(self) -> None:
            if self.failing:
                raise DatabaseUnavailableError("10.0.0.1 refused hunter2")

        async def release_waiters(self) -> None:
            pass

    store = Pinged()
    app = create_app(Settings(), cast(LightningStore, store))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://service")
    assert (await client.get("/readyz")).status_code == 200
    store.failing = True
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert answer.json().keys() == {"type", "title", "status", "detail"}
    assert "hunter2" not in answer.text
    assert (await client.get("/healthz")).status_code == 200
    store.failing = False
    await service_of(app).drain()
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/healthz")).status_code == 200
