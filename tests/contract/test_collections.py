"""The contract of the storage protocols, over memory, SQLite and PostgreSQL."""

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import MetaData, Table

from lightning_sql.collections.memory import MemoryCollection, MemoryKeyValue, MemoryQueue
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.collections.sql import SqlCollection, SqlKeyValue, SqlQueue
from lightning_sql.collections.sql.session import Session
from lightning_sql.database.engine import Database
from lightning_sql.database.schema import collection_table, key_value_table, metadata, queue_table
from lightning_sql.testing.collections_contract import (
    CollectionContract,
    KeyValueContract,
    MakeCollection,
    MakeKeyValue,
    MakeQueue,
    QueueContract,
    TransactionContract,
)
from lightning_sql.testing.samples import SAMPLE_KEYS, Plain, Sample
from tests.backends import POSTGRES, CollectionsOf, run_apart

METADATA = MetaData(naming_convention=metadata.naming_convention)
TABLES: dict[type[Any], Table] = {
    Sample: collection_table("sample_items", Sample, SAMPLE_KEYS, METADATA),
    Plain: collection_table("plain_items", Plain, ["key"], METADATA),
}
QUEUE = queue_table("sample_queue", METADATA)
VALUES = key_value_table("sample_values", METADATA)


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

    def __init__(self, database: Database | None) -> None:
        self.database = database

    def fresh(self) -> Session | None:
        return None if self.database is None else Session(self.database, uuid.uuid4().hex)


@pytest.fixture(scope="session", params=["memory", "sqlite", POSTGRES])
def database_url(request: pytest.FixtureRequest, with_sample_tables: Callable[[str], None]) -> str | None:
    """The URL of the database that a test runs on, or None for memory."""
    if request.param == "memory":
        return None
    url = request.getfixturevalue(f"prepared_{request.param}")
    with_sample_tables(url)
    return url


@pytest.fixture
async def sessions(database_url: str | None) -> AsyncIterator[Sessions]:
    database = None if database_url is None else Database(database_url)
    yield Sessions(database)
    if database is not None:
        await database.close()


class TestCollection(CollectionContract):
    @pytest.fixture
    def make_collection(self, sessions: Sessions) -> MakeCollection:
        async def make(item_type: type[Any], primary_keys: Any) -> Any:
            session = sessions.fresh()
            if session is None:
                return MemoryCollection(item_type, primary_keys)
            return SqlCollection(session, TABLES[item_type], item_type, primary_keys)

        return make


class TestQueue(QueueContract):
    @pytest.fixture
    def make_queue(self, sessions: Sessions) -> MakeQueue:
        async def make(item_type: type[Any]) -> Any:
            session = sessions.fresh()
            return MemoryQueue(item_type) if session is None else SqlQueue(session, QUEUE, item_type)

        return make


class TestKeyValue(KeyValueContract):
    @pytest.fixture
    def make_key_value(self, sessions: Sessions) -> MakeKeyValue:
        async def make() -> Any:
            session = sessions.fresh()
            return MemoryKeyValue() if session is None else SqlKeyValue(session, VALUES)

        return make


class TestTransactions(TransactionContract):
    @pytest.fixture(params=["memory", "sqlite", POSTGRES])
    async def collections(
        self, request: pytest.FixtureRequest, collections_of: CollectionsOf
    ) -> AsyncIterator[LightningCollections]:
        collections = collections_of(request.param)
        yield collections
        await collections.close()


async def test_what_memory_is_given_at_construction_is_not_changed() -> None:
    given = {"k": 1}
    values = MemoryKeyValue[str, Any](given)
    await values.inc("k", 1)
    assert given == {"k": 1}
    items, waiting = [Plain(key="a", value=[1])], ["x", "y"]
    collection, queue = MemoryCollection(Plain, ["key"], items), MemoryQueue(str, waiting)
    await collection.update([Plain(key="a", value=[2])])
    await collection.insert([Plain(key="b")])
    await queue.dequeue()
    assert (items, waiting) == ([Plain(key="a", value=[1])], ["x", "y"])
