"""The backends that the contract suites run over, and the service in front of each.

`memory` is `CollectionStore` over memory, `sqlite` and `postgres` are `SqlStore`, and
`collections-sqlite` and `collections-postgres` are `CollectionStore` over SQL collections. Databases are
prepared once; every test gets a partition of its own, so that it also runs beside the rows of the others.
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self, TypeVar

import pytest
import uvicorn
from litestar import Litestar
from sqlalchemy import MetaData, Table

from lightning_api.app import create_app, service_of
from lightning_api.client import LightningClient
from lightning_api.settings import Settings
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.collections.sql import SqlCollections
from lightning_sql.collections.sql.session import Session
from lightning_sql.database.engine import Database
from lightning_sql.database.schema import collection_table, key_value_table, metadata, queue_table
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.contract.store_time import CLAIM_TIMEOUT
from lightning_sql.testing.postgres import PostgresServer
from lightning_sql.testing.samples import SAMPLE_KEYS, Plain, Sample
from tests.native_laws import broken_laws

R = TypeVar("R")

START = 1_700_000_000.0
SQLITE = pytest.param("sqlite", marks=pytest.mark.slow)
"""For what the fast tests leave to memory; some of everything runs on SQLite in them as well."""
POSTGRES = pytest.param("postgres", marks=pytest.mark.slow)
COLLECTIONS = tuple(pytest.param(f"collections-{kind}", marks=pytest.mark.slow) for kind in ("sqlite", "postgres"))
"""The protocol backends under the whole store."""


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also where an event loop is running already."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, work).result()


class Clock:
    """Seconds since the epoch, which pass only when a test says so."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def prepared_sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an SQLite file with our tables, for the whole session."""
    url = f"sqlite:///{tmp_path_factory.mktemp('contract') / 'lightning.db'}?synchronous=NORMAL"
    run_apart(prepare_database(url))
    return url


@pytest.fixture(scope="session")
def prepared_postgres(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a PostgreSQL database with our tables, for the whole session."""
    url = postgres.create_database()
    run_apart(prepare_database(url))
    yield url
    postgres.drop_database(url)


METADATA = MetaData(naming_convention=metadata.naming_convention)
SAMPLE_TABLES: dict[type[Any], Table] = {
    Sample: collection_table("sample_items", Sample, SAMPLE_KEYS, METADATA),
    Plain: collection_table("plain_items", Plain, ["key"], METADATA),
}
SAMPLE_QUEUE = queue_table("sample_queue", METADATA)
SAMPLE_VALUES = key_value_table("sample_values", METADATA)


@pytest.fixture(scope="session")
def with_sample_tables() -> Callable[[str], None]:
    """Adds the tables of the suites' own item types to a database, once."""
    done: set[str] = set()

    async def create(url: str) -> None:
        database = Database(url)
        async with database.transaction(writing=True) as connection:
            await connection.run_sync(METADATA.create_all)
        await database.close()

    def ensure(url: str) -> None:
        if url not in done:
            run_apart(create(url))
            done.add(url)

    return ensure


class Sessions:
    """Sessions on one database, each in a partition of its own; None over memory."""

    def __init__(self, database_url: str | None) -> None:
        self.database = None if database_url is None else Database(database_url)

    def fresh(self) -> Session | None:
        return None if self.database is None else Session(self.database, uuid.uuid4().hex)

    async def close(self) -> None:
        if self.database is not None:
            await self.database.close()


SessionsOf = Callable[[str], Sessions]


@pytest.fixture
def sessions_of(database_of: Callable[[str], str], with_sample_tables: Callable[[str], None]) -> SessionsOf:
    """Sessions of a kind, on a database with the tables of the suites' item types."""

    def make(kind: str) -> Sessions:
        if kind == "memory":
            return Sessions(None)
        url = database_of(kind)
        with_sample_tables(url)
        return Sessions(url)

    return make


@pytest.fixture
def database_of(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The URL of the prepared database of a kind: `sqlite` or `postgres`."""
    return lambda kind: request.getfixturevalue(f"prepared_{kind}")


CollectionsOf = Callable[[str], LightningCollections]


@pytest.fixture
def collections_of(database_of: Callable[[str], str], clock: Clock) -> CollectionsOf:
    """Empty collections of a kind: `memory`, `sqlite` or `postgres`."""

    def make(kind: str) -> LightningCollections:
        if kind == "memory":
            return MemoryCollections(clock=clock)
        return SqlCollections(Database(database_of(kind)), partition=uuid.uuid4().hex, clock=clock)

    return make


class NewStore(Protocol):
    """Makes stores of a kind, each on an empty partition unless one is named; whoever asks closes them."""

    def __call__(
        self,
        kind: str,
        *,
        partition: str | None = None,
        scan_debounce_seconds: float = 0.0,
        real_time: bool = False,
        join: bool = True,
        claim_timeout_seconds: float | None = None,
    ) -> LightningStore: ...


@pytest.fixture
def new_store(database_of: Callable[[str], str], collections_of: CollectionsOf, clock: Clock) -> NewStore:
    """Stores that go by the test's clock, unless they are to live in real time."""

    def make(
        kind: str,
        *,
        partition: str | None = None,
        scan_debounce_seconds: float = 0.0,
        real_time: bool = False,
        join: bool = True,
        claim_timeout_seconds: float | None = None,
    ) -> LightningStore:
        if kind in ("sqlite", "postgres"):
            return SqlStore(
                Database(database_of(kind)),
                partition=partition or uuid.uuid4().hex,
                scan_debounce_seconds=scan_debounce_seconds,
                clock=None if real_time else clock,
                join=join,
                claim_timeout_seconds=claim_timeout_seconds,
            )
        assert partition is None
        assert not real_time
        collections = collections_of(kind.removeprefix("collections-"))
        return CollectionStore(
            collections,
            scan_debounce_seconds=scan_debounce_seconds,
            clock=clock,
            claim_timeout_seconds=claim_timeout_seconds,
        )

    return make


class ServerThread:
    """A uvicorn server of an application, in a thread and an event loop of its own.

    Starting and stopping a server takes longer than most tests, so one server serves the whole
    session, each test with a store of its own.
    """

    def __init__(self, app: Litestar) -> None:
        self.service = service_of(app)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="contract server")

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started and not serving.done():  # noqa: ASYNC110 - uvicorn tells nobody when it is
            await asyncio.sleep(0.002)
        if self._server.started:
            self._ready.set_result(asyncio.get_running_loop())
        else:
            self._ready.set_exception(RuntimeError("the server did not start"))
        await serving

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop = self._ready.result(timeout=30)
        self._own_store = self.service.store
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.service.current_store = self._own_store
        self._server.should_exit = True
        self._thread.join()

    @property
    def address(self) -> str:
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    @asynccontextmanager
    async def serving(self, store: LightningStore) -> AsyncIterator[str]:
        """The address at which the store is served; it is closed at the end, in the loop that used it."""
        self.service.current_store = store
        try:
            yield self.address
        finally:
            await self.close(store)

    async def close(self, store: LightningStore) -> None:
        """Close a store in the event loop that used it."""
        self.service.current_store = self._own_store
        await self.run(store.close())

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run something in the server's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    with ServerThread(create_app(Settings(database_url="memory://", scan_debounce_seconds=0))) as server:
        yield server


@pytest.fixture
async def store_of(request: pytest.FixtureRequest, new_store: NewStore, clock: Clock) -> AsyncIterator[LightningStore]:
    """An empty store of the kind that the test is parametrized with, `http-…` for a client of one.

    With `…-claims-end`, its claims end after `CLAIM_TIMEOUT` seconds in which nothing is heard. Whatever the test did
    to it, a native store must have kept the laws below its surface.
    """
    kind: str = request.param
    plain = kind.removesuffix("-claims-end")
    store = new_store(plain.removeprefix("http-"), claim_timeout_seconds=CLAIM_TIMEOUT if plain != kind else None)
    if not kind.startswith("http-"):
        async with store:
            yield store
            assert await broken_laws(store, clock.now) == []
        return
    server: ServerThread = request.getfixturevalue("server")
    async with server.serving(store) as address:
        async with LightningClient(address) as client:
            yield client
        assert await server.run(broken_laws(store, clock.now)) == []
