"""A service in this process, and servers in processes of their own."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar

from lightning_api.app import create_app
from lightning_api.settings import Settings
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.backends import clock, collections_of, database_of, new_store, prepared_postgres, prepared_sqlite

__all__ = [
    "clock",
    "collections_of",
    "database_of",
    "new_store",
    "prepared_postgres",
    "prepared_sqlite",
]

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(app: Litestar) -> AsyncIterator[None]:
    """Between an application's start and its end, which must happen in one task, and fixtures have several."""
    started, stop = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with app.lifespan():
            started.set()
            await stop.wait()

    living = asyncio.create_task(live())
    starting = asyncio.create_task(started.wait())
    await asyncio.wait({living, starting}, return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()
    try:
        yield
    finally:
        stop.set()
        await living


Serve = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    """An empty store in memory, whose watchdog looks before every call."""
    async with await open_store("memory://", scan_debounce_seconds=0.0) as opened:
        yield opened


@pytest.fixture
async def serve(store: LightningStore) -> AsyncIterator[Serve]:
    """Makes clients of services: `await serve(store=…, token=…)` takes settings, and the `store` fixture by default."""
    async with AsyncExitStack() as stack:

        async def start(
            store: LightningStore | None = store, peer: tuple[str, int] | None = ("127.0.0.1", 123), **settings: Any
        ) -> httpx.AsyncClient:
            app = create_app(Settings(**{"database_url": "memory://", "scan_debounce_seconds": 0.0} | settings), store)
            await stack.enter_async_context(running(app))
            transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=False, client=cast(Any, peer))
            return await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://service"))

        yield start


@pytest.fixture
async def client(serve: Serve) -> httpx.AsyncClient:
    """A client of a service with the default settings."""
    return await serve()


class Server:
    """A `lightning-sql serve` process.

    Args:
        arguments: of the command; `--port 0` is added.
        variables: environment variables to set.
    """

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_api", "serve", "--port", "0", *arguments],
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._announced = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if " serving " in line:
                self.port = int(line.rpartition(":")[2])
                self._announced.set()
        self._announced.set()

    def ready(self) -> "Server":
        """Wait until it serves."""
        assert self._announced.wait(60), self.lines
        assert self.port, self.lines
        return self

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
        """One request, answered in JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its children."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end and return its status."""
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def environment(**variables: str) -> dict[str, str]:
    """The variables of a child process that finds this checkout."""
    found = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}", "COLUMNS": "80", "LINES": "24"}
    return found | variables


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the test."""
    servers: list[Server] = []

    def start(*arguments: str, **variables: str) -> Server:
        server = Server(*arguments, **variables)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `lightning-sql` to its end, in an empty folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lightning_api", *arguments],
            env=environment(**variables),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something is true; how long that takes is not asserted, only that it happens."""

    def check(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.02)

    return check
