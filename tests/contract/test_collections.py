"""The contract of the storage protocols, over memory, SQLite and PostgreSQL."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightning_sql.collections.memory import MemoryCollection, MemoryKeyValue, MemoryQueue
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.collections.sql import SqlCollection, SqlKeyValue, SqlQueue
from lightning_sql.testing.collections_contract import (
    CollectionContract,
    KeyValueContract,
    MakeCollection,
    MakeKeyValue,
    MakeQueue,
    QueueContract,
    TransactionContract,
)
from lightning_sql.testing.samples import Plain
from tests.backends import (
    POSTGRES,
    SAMPLE_QUEUE,
    SAMPLE_TABLES,
    SAMPLE_VALUES,
    SQLITE,
    CollectionsOf,
    Sessions,
    SessionsOf,
)


@pytest.fixture(params=["memory", SQLITE, POSTGRES])
async def sessions(request: pytest.FixtureRequest, sessions_of: SessionsOf) -> AsyncIterator[Sessions]:
    sessions = sessions_of(request.param)
    yield sessions
    await sessions.close()


class TestCollection(CollectionContract):
    @pytest.fixture
    def make_collection(self, sessions: Sessions) -> MakeCollection:
        async def make(item_type: type[Any], primary_keys: Any) -> Any:
            session = sessions.fresh()
            if session is None:
                return MemoryCollection(item_type, primary_keys)
            return SqlCollection(session, SAMPLE_TABLES[item_type], item_type, primary_keys)

        return make


class TestQueue(QueueContract):
    @pytest.fixture
    def make_queue(self, sessions: Sessions) -> MakeQueue:
        async def make(item_type: type[Any]) -> Any:
            session = sessions.fresh()
            return MemoryQueue(item_type) if session is None else SqlQueue(session, SAMPLE_QUEUE, item_type)

        return make


class TestKeyValue(KeyValueContract):
    @pytest.fixture
    def make_key_value(self, sessions: Sessions) -> MakeKeyValue:
        async def make() -> Any:
            session = sessions.fresh()
            return MemoryKeyValue() if session is None else SqlKeyValue(session, SAMPLE_VALUES)

        return make


class TestTransactions(TransactionContract):
    @pytest.fixture(params=["memory", "sqlite", POSTGRES])
    async def collections(
        self, request: pytest.FixtureRequest, collections_of: CollectionsOf
    ) -> AsyncIterator[LightningCollections]:
        collections = collections_of(request.param)
        yield collections
        await collections.close()


class NewerPlain(Plain):
    """A model that a newer release of another library gave more fields than the table has columns for."""

    first: str | None = None
    second: list[int] | None = None


@pytest.mark.parametrize("kind", ["sqlite", POSTGRES])
async def test_fields_without_a_column_are_kept_and_updated_one_by_one(kind: str, sessions_of: SessionsOf) -> None:
    sessions = sessions_of(kind)
    session = sessions.fresh()
    assert session is not None
    items = SqlCollection(session, SAMPLE_TABLES[Plain], NewerPlain, ["key"])
    await items.insert([NewerPlain(key="a", value=1, first="one", second=[1]), NewerPlain(key="b")])
    skeletons = [NewerPlain(key="a", value=-1, first="two"), NewerPlain(key="b", value=-1, first="three")]
    expected = [NewerPlain(key="a", value=1, first="two", second=[1]), NewerPlain(key="b", first="three")]
    assert list(await items.update(skeletons, ["first"])) == expected
    assert (await items.query()).items == expected
    assert list(await items.upsert(skeletons[:1], ["first", "value"])) == [
        NewerPlain(key="a", value=-1, first="two", second=[1])
    ]
    assert [item.key for item in (await items.query({"second": {"contains": 1}})).items] == ["a"]
    await sessions.close()


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
