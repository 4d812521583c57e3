"""Whatever is asked of a collection in SQL, it answers what the one in memory does."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sql.collections.memory import MemoryCollection
from lightning_sql.collections.protocols import Collection
from lightning_sql.collections.sql import SqlCollection
from lightning_sql.errors import LightningError
from lightning_sql.testing.samples import SAMPLE_KEYS, Sample, assert_same
from tests.backends import POSTGRES, SAMPLE_TABLES, SQLITE, SessionsOf
from tests.properties.strategies import payloads, short_texts

DATABASES = pytest.mark.parametrize("kind", [SQLITE, POSTGRES])
EFFORT = {"sqlite": 100, "postgres": 80}

words = st.sampled_from(["", "a", "b", "ab", "A", "a%", "\x00", "\ud800", "\x1aa", "é"])
column_floats = st.sampled_from([0.0, 1.0, 1.5, -1.5, 1e300, float("inf"), float("-inf")])
scalars: dict[str, st.SearchStrategy[Any]] = {
    "name": st.none() | words | short_texts,
    "count": st.none() | st.integers(-2, 2) | st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63)]),
    "score": st.none() | column_floats,
    "seen_time": st.none() | column_floats,
    "flag": st.none() | st.booleans(),
}
documents: dict[str, st.SearchStrategy[Any]] = {
    "tags": st.none() | st.lists(words | st.integers(-1, 1) | st.booleans() | st.none(), max_size=3),
    "data": st.none() | st.sampled_from(["ab", 1, True, 1.0, [1, "a"], {"a": 1}, {}]) | payloads,
    "more": st.none() | words | st.lists(words, max_size=2),
}
fields = st.fixed_dictionaries({}, optional=scalars | documents)
keys = st.tuples(st.sampled_from(["g", "h", ""]), st.integers(0, 3))
samples = st.builds(lambda key, values: Sample(group=key[0], number=key[1], **values), keys, fields)
wanted = st.one_of(*scalars.values(), *documents.values(), st.sampled_from([1.0, True, 0, "1", 2**70, -0.0]))

FIELD_NAMES = [*scalars, *documents, "group", "number", "unheard of"]


@st.composite
def conditions(draw: st.DrawFn, items: list[Sample]) -> dict[str, Any]:
    """Conditions on some fields, with values that some item has more often than by chance."""
    found: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(FIELD_NAMES), max_size=3, unique=True)):
        present = [getattr(item, name, None) for item in items]
        value = st.sampled_from(present) | wanted if present else wanted
        operators: dict[str, st.SearchStrategy[Any]] = {
            "exact": value,
            "contains": st.one_of(value, words, value.map(lambda text: text[:1] if isinstance(text, str) else text)),
            "within": st.lists(value, max_size=3),
        }
        chosen = draw(st.lists(st.sampled_from(list(operators)), max_size=2, unique=True))
        found[name] = {operator: draw(operators[operator]) for operator in chosen}
    return found


class Pair:
    """A collection in memory and one in SQL, in an event loop of their own."""

    def __init__(self, sessions_of: SessionsOf, kind: str) -> None:
        self.sessions = sessions_of(kind)
        self.runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.runner.run(self.sessions.close())
        self.runner.close()

    def fresh(self) -> tuple[Collection[Sample], Collection[Sample]]:
        session = self.sessions.fresh()
        assert session is not None
        return (
            MemoryCollection(Sample, SAMPLE_KEYS),
            SqlCollection(session, SAMPLE_TABLES[Sample], Sample, SAMPLE_KEYS),
        )

    def run(self, work: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await work

        return self.runner.run(wait())


def unique(items: list[Sample]) -> list[Sample]:
    return list({(item.group, item.number): item for item in items}.values())


def sortable(items: list[Sample]) -> list[str]:
    """The fields to sort by. Strings that SQL cannot store as they are sort by how they are written instead."""
    odd = any(re.search("[\x00\ud800-\udfff]|^\x1a", item.name or "") for item in items)
    return [name for name in ("group", "number", *scalars) if name != "name" or not odd]


@DATABASES
def test_queries_agree(kind: str, sessions_of: SessionsOf) -> None:
    with Pair(sessions_of, kind) as pair:

        @settings(max_examples=EFFORT[kind])
        @given(items=st.lists(samples, max_size=8).map(unique), data=st.data())
        def check(items: list[Sample], data: st.DataObject) -> None:
            memory, sql = pair.fresh()
            for collection in (memory, sql):
                pair.run(collection.insert(items))
            for _ in range(4):
                filter_ = data.draw(conditions(items))
                filter_["_aggregate"] = data.draw(st.sampled_from(["and", "or"]))
                if data.draw(st.booleans()):
                    filter_["_must"] = data.draw(conditions(items))
                name = data.draw(st.none() | st.sampled_from(sortable(items)))
                order = data.draw(st.sampled_from(["asc", "desc"]))
                sort: Any = None if name is None else {"name": name, "order": order}
                limit, offset = data.draw(st.sampled_from([-1, -1, 0, 1, 3])), data.draw(st.integers(0, 2))
                expected = pair.run(memory.query(filter_, sort, limit, offset))
                found = pair.run(sql.query(filter_, sort, limit, offset))
                assert_same(found.items, expected.items)
                assert found.total == expected.total
                assert_same(pair.run(sql.get(filter_, sort)), pair.run(memory.get(filter_, sort)))

        check()


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the type of the error that it raises."""
    try:
        return call()
    except LightningError as error:
        return type(error)


@DATABASES
def test_writes_agree(kind: str, sessions_of: SessionsOf) -> None:
    update_fields = st.none() | st.lists(
        st.sampled_from(["name", "count", "score", "flag", "tags", "data", "group", "number"]), max_size=3
    )
    writes = st.tuples(
        st.sampled_from(["insert", "update", "upsert", "upsert", "delete"]),
        st.lists(samples, max_size=4),
        update_fields,
    )
    with Pair(sessions_of, kind) as pair:

        @settings(max_examples=EFFORT[kind])
        @given(calls=st.lists(writes, min_size=1, max_size=8))
        def check(calls: list[tuple[str, list[Sample], Any]]) -> None:
            memory, sql = pair.fresh()
            for method, items, names in calls:
                options = (names,) if method in ("update", "upsert") else ()
                expected, found = (
                    outcome(partial(pair.run, getattr(one, method)(items, *options))) for one in (memory, sql)
                )
                assert_same(found, expected)
                assert_same(pair.run(sql.query()).items, pair.run(memory.query()).items)

        check()
