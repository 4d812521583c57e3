"""Where the fault tests play: a database, servers on it, crews who work on them, and everything that can go wrong."""

import asyncio
import random
import signal
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from bench.processes import python_path
from lightning_sql.database.engine import Database
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.postgres import PostgresCluster, free_port
from tests.faults.ledger import Ledger, Report, check, read
from tests.faults.narrow import limit_of
from tests.faults.proxy import Proxy, proxy_to

__all__ = ["FAULTS", "OF_THE_DATABASE", "Fault", "Server", "Stage", "faults_on", "stage_on", "until"]

ROOT = Path(__file__).parents[2]
PATIENCE = 100.0
IN_FLIGHT = 16
"""So many requests must be on their way when a fault falls."""
FROZEN_SECONDS = 5.0
WARM_CLAIMS = 50


async def until(holds: Callable[[], bool], *, pause: float = 0.1, patience: float = PATIENCE) -> None:
    """Wait until something holds, and look every so many seconds.

    Raises:
        TimeoutError: it does not for too long.
    """
    deadline = asyncio.get_running_loop().time() + patience
    while not holds():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError("what is waited for does not happen")
        await asyncio.sleep(pause)


class Server:
    """A server process that always listens at the same place."""

    def __init__(self, database_url: str, log: Path, module: Sequence[str], options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._options = options
        self._module = module
        self._database_url = database_url
        self._log = log
        self.process: Process | None = None

    async def start(self) -> None:
        """Start it, and return when it is ready."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self._module, "serve", "--port", str(self.port)),
                *("--database-url", self._database_url, "--scan-debounce-seconds", "1", *self._options),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=python_path(),
                cwd=ROOT,
            )
        await self.until_ready()

    async def until_ready(self) -> None:
        """Wait until it serves."""
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{self.port}/readyz", timeout=_MOMENT) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                assert self.process is not None
                assert self.process.returncode is None, f"a server ended by itself; {self._log.read_text()[-3000:]}"
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> int:
        """Send it a signal that ends it; its exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def kill(self) -> None:
        """Leave no process, whether it was started or not."""
        if self.process is not None:
            await self.end(signal.SIGKILL)


_MOMENT = aiohttp.ClientTimeout(total=2.0)


class Stage:
    """Made by `stage_on`."""

    def __init__(self, database_url: str, cluster: PostgresCluster | None, folder: Path) -> None:
        self.database_url = database_url
        self.cluster = cluster
        self.folder = folder
        self.servers: list[Server] = []
        self.fronts: list[Proxy] = []
        """What stands between the crews and the servers."""
        self.behind: Proxy | None = None
        """What stands between the servers and the database."""
        self.happened: Counter[str] = Counter()
        self._crews: list[Process] = []

    @property
    def urls(self) -> list[str]:
        """Where crews find the servers."""
        return [f"http://127.0.0.1:{front.port}" for front in self.fronts]

    async def hire(self, kind: str, runners: int) -> None:
        """Let another crew begin to work."""
        name = f"{kind}{len(self._crews)}"
        with (self.folder / f"{name}.log").open("wb") as log:
            crew = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.crew", kind, str(self.folder), name, str(runners), *self.urls),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=python_path(),
                cwd=ROOT,
            )
        self._crews.append(crew)

    async def warm(self) -> None:
        """Wait until the crews have claimed something."""
        await until(lambda: len(self._ledger().claims) >= WARM_CLAIMS)

    def _ledger(self) -> Ledger:
        return read(self.folder.glob("*.jsonl"))

    async def in_flight(self) -> int:
        """How many requests of all crews are on their way."""
        total = 0
        for crew in self._crews:
            assert crew.stdin is not None
            assert crew.stdout is not None
            crew.stdin.write(b"flight\n")
            total += int(await crew.stdout.readline())
        return total

    async def suffer(self, fault: str) -> None:
        """Let something go wrong in the middle of everything, and mend it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while await self.in_flight() < IN_FLIGHT:
            assert asyncio.get_running_loop().time() < deadline, "the crews do not work"
            await asyncio.sleep(0.01)
        await FAULTS[fault](self)
        self.happened[fault] += 1

    async def dismiss(self) -> None:
        """Let the crews stop working."""
        for crew in self._crews:
            assert crew.stdin is not None
            crew.stdin.close()
        async with asyncio.timeout(PATIENCE):
            codes = [await crew.wait() for crew in self._crews]
        logs = "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log") if "server" not in log.name)
        assert codes == [0] * len(codes), logs
        self._crews.clear()

    async def verdict(self) -> Report:
        """What of everything that was acknowledged the database does not have; ask when the servers are gone."""
        store = SqlStore(Database(self.database_url))
        try:
            return await check(self._ledger(), store)
        finally:
            await store.close()

    async def close(self) -> None:
        """Leave no process."""
        for crew in self._crews:
            if crew.returncode is None:
                crew.kill()
                await crew.wait()
        for server in self.servers:
            await server.kill()


@asynccontextmanager
async def stage_on(
    database_url: str,
    folder: Path,
    *,
    cluster: PostgresCluster | None = None,
    servers: int = 1,
    module: Sequence[str] = ("tests.faults.narrow",),
    options: Sequence[str] = (),
) -> AsyncGenerator[Stage]:
    """A stage with running servers.

    Args:
        database_url: an empty database.
        folder: for notebooks and logs.
        cluster: what the database is in, if it can be killed.
        servers: how many.
        module: what runs as a server, and what its arguments begin with; by default the product's own, of which
            an SQLite file can be made full.
        options: more of a server's.
    """
    await prepare_database(database_url)
    stage = Stage(database_url, cluster, folder)
    async with AsyncExitStack() as stack:
        url = database_url
        if cluster is not None:
            place = urlsplit(database_url)
            stage.behind = await stack.enter_async_context(proxy_to("127.0.0.1", place.port or 5432))
            url = place._replace(netloc=f"{place.username}@127.0.0.1:{stage.behind.port}").geturl()
        stack.push_async_callback(stage.close)
        for number in range(servers):
            server = Server(url, folder / f"server-{number}.log", module, options)
            stage.servers.append(server)
            await server.start()
            stage.fronts.append(await stack.enter_async_context(proxy_to("127.0.0.1", server.port)))
        yield stage


# What can go wrong

Fault = Callable[[Stage], Awaitable[None]]


async def kill_a_server(stage: Stage) -> None:
    """Kill -9, and start it again."""
    server = random.choice(stage.servers)
    await server.end(signal.SIGKILL)
    await server.start()


async def stop_a_server(stage: Stage) -> None:
    """SIGTERM under load, and start it again."""
    server = random.choice(stage.servers)
    code = await server.end(signal.SIGTERM)
    assert code == 0, f"a server that was asked to stop ended with {code}"
    await server.start()


async def freeze_a_server(stage: Stage) -> None:
    """Nothing runs in it for some seconds."""
    server = random.choice(stage.servers)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_SECONDS)
    server.process.send_signal(signal.SIGCONT)
    await server.until_ready()


async def kill_the_database(stage: Stage) -> None:
    """Kill -9 of PostgreSQL with all its backends, and start it again."""
    assert stage.cluster is not None
    await asyncio.to_thread(stage.cluster.kill)
    await asyncio.sleep(random.uniform(0.0, 0.5))
    await asyncio.to_thread(stage.cluster.start)
    for server in stage.servers:
        await server.until_ready()


async def end_sessions(stage: Stage) -> None:
    """The database ends half of its sessions, those that are at work among them."""
    assert stage.cluster is not None
    await asyncio.to_thread(
        stage.cluster.execute,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND (state = 'active' OR random() < 0.5)",
    )


async def drop_clients(stage: Stage) -> None:
    """Half of the connections between clients and servers are reset."""
    for front in stage.fronts:
        front.drop(0.5)


async def half_close_clients(stage: Stage) -> None:
    """On half of the connections between clients and servers, no answer arrives any more."""
    for front in stage.fronts:
        front.half_close(0.5)


async def drop_sessions(stage: Stage) -> None:
    """Half of the connections between servers and the database are reset."""
    assert stage.behind is not None
    stage.behind.drop(0.5)


async def half_close_sessions(stage: Stage) -> None:
    """On half of the connections between servers and the database, no answer arrives any more."""
    assert stage.behind is not None
    stage.behind.half_close(0.5)


async def hang_up(stage: Stage) -> None:
    """Clients lose their patience in the middle of requests."""
    timeout = aiohttp.ClientTimeout(total=0.003)

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        try:
            body = {"worker_id": f"impatient-{uuid.uuid4().hex[:4]}", "limit": 1}
            async with session.post(f"{url}/v1/agl/queues/rollouts/dequeue", json=body) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass

    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(ask(session, random.choice(stage.urls)) for _ in range(20)))


FULL_SECONDS = 1.0
ROOM = 1_000_000
"""Bytes that a file that is full has no room for."""


async def fill_the_file(stage: Stage) -> None:
    """The SQLite file may not grow for a while; when it may again, servers go on by themselves."""
    assert stage.cluster is None
    limit = limit_of(urlsplit(stage.database_url).path.removeprefix("/"))
    started = [server.process for server in stage.servers]
    limit.write_text("1")
    try:
        for server in stage.servers:
            await _enqueue_until(server, 503)
        await asyncio.sleep(FULL_SECONDS)
    finally:
        limit.unlink()
    for server in stage.servers:
        await _enqueue_until(server, 201)
    assert [server.process for server in stage.servers] == started
    assert all(process is not None and process.returncode is None for process in started)


async def _enqueue_until(server: Server, wanted: int) -> None:
    """Enqueue something large until it is stored, or refused because there is no room."""
    url = f"http://127.0.0.1:{server.port}/v1/agl/queues/rollouts/enqueue"
    body = {"rollouts": [{"input": "x" * ROOM}]}
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as session:
        while True:
            async with session.post(url, json=body) as response:
                # Those who are refused for want of room may keep the file busy, and that is answered with 503 as well.
                if response.status == wanted and (wanted != 503 or "no room" in (await response.json())["detail"]):
                    break
            await asyncio.sleep(0.05)
    if wanted == 503:
        assert response.headers["retry-after"] == "1"


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_a_server,
        stop_a_server,
        freeze_a_server,
        kill_the_database,
        end_sessions,
        drop_clients,
        half_close_clients,
        drop_sessions,
        half_close_sessions,
        hang_up,
        fill_the_file,
    )
}

OF_THE_DATABASE = frozenset({"kill_the_database", "end_sessions", "drop_sessions", "half_close_sessions"})
"""Those that need a database that is a server."""

OF_A_FILE = frozenset({"fill_the_file"})
"""Those that need a database that is a file."""


def faults_on(cluster: PostgresCluster | None) -> list[str]:
    """What can go wrong with a database in a cluster, or in a file."""
    return [fault for fault in FAULTS if fault not in (OF_THE_DATABASE if cluster is None else OF_A_FILE)]
