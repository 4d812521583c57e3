"""What every `Collection` does when it is read: order, filters, pages, snapshots."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import pytest

from lightning_sql.collections.protocols import Collection
from lightning_sql.errors import InvalidRequestError
from lightning_sql.testing.samples import SAMPLE_KEYS, Sample, sample

__all__ = ["CollectionReads", "MakeCollection"]

MakeCollection: TypeAlias = Callable[[type[Any], Sequence[str]], Awaitable[Collection[Any]]]
"""Makes an empty collection of an item type with the given primary key; each call makes another one."""

SORTABLE: dict[str, list[Any]] = {
    "name": ["b", None, "B", "", "a", "é", "\uffff", "\U0001f600", "b", "aa", None, "_", "~"],
    "count": [3, None, -1, 0, 3, 2**63 - 1, -(2**63), None, 1],
    "score": [1.5, None, -1.5, 0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, None],
    "seen_time": [5.0, None, -5.0, 0.0, 5.0, None, 1e300],
    "flag": [True, None, False, True, None, False],
}
NULL_COUNTS_AS: dict[str, Any] = {"name": "", "count": 0, "score": 0.0, "seen_time": math.inf, "flag": False}


def numbers(items: Sequence[Sample]) -> list[int]:
    """The second key field of each item."""
    return [item.number for item in items]


class CollectionReads:
    """Needs the fixture `make_collection`, a `MakeCollection`."""

    @pytest.fixture
    async def samples(self, make_collection: MakeCollection) -> Collection[Sample]:
        """An empty collection of `Sample`."""
        return await make_collection(Sample, SAMPLE_KEYS)

    async def found(self, samples: Collection[Sample], filter_: Any, **options: Any) -> list[int]:
        """The numbers of the items that a filter lets through; `query` and `get` must agree."""
        page = await samples.query(filter_, **options)
        first = await samples.get(filter_, options.get("sort"))
        if not options.get("offset") and options.get("limit") != 0:
            assert first == (page.items[0] if page.items else None)
        return numbers(page.items)

    async def test_it_says_what_it_holds(self, samples: Collection[Sample]) -> None:
        assert list(samples.primary_keys()) == list(SAMPLE_KEYS)
        assert samples.item_type() is Sample
        assert type(samples).__name__ in repr(samples)
        assert "Sample" in repr(samples)
        assert samples.collection_name
        assert samples.tracker is None

    async def test_an_empty_collection(self, samples: Collection[Sample]) -> None:
        page = await samples.query()
        assert (page.items, page.limit, page.offset, page.total) == ([], -1, 0, 0)
        assert await samples.get() is None
        assert await samples.size() == 0

    async def test_without_a_sort_the_order_is_that_of_insertion(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number) for number in (5, 1, 9)])
        await samples.insert([sample(3), sample(7, group="a")])
        assert numbers((await samples.query()).items) == [5, 1, 9, 3, 7]
        await samples.update([sample(1, name="later")])
        await samples.upsert([sample(9, name="later"), sample(2)])
        assert numbers((await samples.query()).items) == [5, 1, 9, 3, 7, 2]
        await samples.delete([sample(5)])
        await samples.insert([sample(5)])
        assert numbers((await samples.query()).items) == [1, 9, 3, 7, 2, 5]

    @pytest.mark.parametrize("field", SORTABLE)
    @pytest.mark.parametrize("order", ["asc", "desc"])
    async def test_sorting_is_stable_and_places_nulls(
        self, samples: Collection[Sample], field: str, order: Any
    ) -> None:
        values = SORTABLE[field]
        await samples.insert([sample(number, **{field: value}) for number, value in enumerate(values)])

        def key(number: int) -> Any:
            return NULL_COUNTS_AS[field] if values[number] is None else values[number]

        expected = sorted(range(len(values)), key=key, reverse=order == "desc")
        assert await self.found(samples, None, sort={"name": field, "order": order}) == expected

    async def test_sorting_is_ascending_unless_it_says_otherwise(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(2), sample(1), sample(3)])
        assert await self.found(samples, None, sort={"name": "number"}) == [1, 2, 3]

    async def test_ties_keep_the_order_of_insertion_across_pages(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number, count=number % 2) for number in range(10)])
        sort: Any = {"name": "count", "order": "desc"}
        pages = [numbers((await samples.query(None, sort, 3, offset)).items) for offset in range(0, 12, 3)]
        assert pages == [[1, 3, 5], [7, 9, 0], [2, 4, 6], [8]]

    @pytest.mark.parametrize(
        "sort",
        [
            {"name": ""},
            {"name": "missing"},
            {"name": "tags"},
            {"name": "data"},
            {"name": "name", "order": "up"},
            {"order": "asc"},
        ],
    )
    @pytest.mark.parametrize("filled", [False, True])
    async def test_an_impossible_sort_is_refused_even_when_nothing_is_sorted(
        self, samples: Collection[Sample], sort: Any, filled: bool
    ) -> None:
        if filled:
            await samples.insert([sample(1, data=1), sample(2, data="x")])
        with pytest.raises(InvalidRequestError):
            await samples.query(None, sort)
        with pytest.raises(InvalidRequestError):
            await samples.get(None, sort)

    async def test_pages(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number) for number in range(5)])
        for limit, offset, expected in [
            (2, 0, [0, 1]),
            (2, 4, [4]),
            (-1, 3, [3, 4]),
            (-1, 0, [0, 1, 2, 3, 4]),
            (0, 0, []),
            (3, 9, []),
            (100, 1, [1, 2, 3, 4]),
        ]:
            page = await samples.query({"group": {"exact": "g"}}, None, limit, offset)
            assert (numbers(page.items), page.limit, page.offset, page.total) == (expected, limit, offset, 5)

    async def test_a_page_is_a_sequence(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number) for number in range(3)])
        page = await samples.query()
        assert len(page) == 3
        assert page[1].number == 1
        assert numbers(page[1:]) == [1, 2]
        assert [item.number for item in page] == [0, 1, 2]
        assert page[0] in page

    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            ({"name": {"exact": "ab"}}, [0]),
            ({"name": {"exact": "AB"}}, [1]),
            ({"name": {"exact": "a"}}, []),
            ({"name": {"exact": ""}}, [5]),
            ({"name": {"exact": 1}}, []),
            ({"count": {"exact": 1}}, [1]),
            ({"count": {"exact": 1.0}}, [1]),
            ({"count": {"exact": 1.5}}, []),
            ({"count": {"exact": "1"}}, []),
            ({"count": {"exact": 2**70}}, []),
            ({"count": {"exact": math.nan}}, []),
            ({"count": {"exact": math.inf}}, []),
            ({"score": {"exact": 0.5}}, [0]),
            ({"score": {"exact": 1}}, [1]),
            ({"score": {"exact": "0.5"}}, []),
            ({"score": {"exact": 10**400}}, []),
            ({"flag": {"exact": True}}, [0]),
            ({"flag": {"exact": False}}, [1]),
            ({"flag": {"exact": "true"}}, []),
            ({"name": {"exact": "\x00"}}, []),
            ({"name": {"exact": "\ud800"}}, []),
            ({"name": {"within": ["ab", "x", "%_\\'"]}}, [0, 2]),
            ({"name": {"within": {"AB"}}}, [1]),
            ({"name": {"within": ()}}, []),
            ({"name": {"within": []}}, []),
            ({"name": {"within": 5}}, []),
            ({"name": {"within": [None, "ab"]}}, [0]),
            ({"name": {"within": [None]}}, []),
            ({"name": {"within": ["ab", 7, None, ["ab"], {"a": 1}, 2**70, math.nan, "\x00", "\udfff"]}}, [0]),
            ({"count": {"within": [0, "1", 2**80, 1.5, math.nan]}}, [0]),
            ({"score": {"within": [0.5, 1, 10**400, "x"]}}, [0, 1]),
            ({"name": {"contains": "b"}}, [0]),
            ({"name": {"contains": "B"}}, [1]),
            ({"name": {"contains": "%"}}, [2]),
            ({"name": {"contains": "_"}}, [2]),
            ({"name": {"contains": "\\"}}, [2]),
            ({"name": {"contains": "'"}}, [2]),
            ({"name": {"contains": ""}}, [0, 1, 2, 4, 5]),
            ({"name": {"contains": "\u00e9"}}, [4]),
            ({"name": {"contains": "\x00"}}, []),
            ({"name": {"contains": "\ud83d"}}, []),
            ({"name": {"contains": 1}}, []),
            ({"count": {"contains": 1}}, []),
            ({"count": {"contains": "1"}}, []),
            ({"tags": {"contains": "x"}}, [0]),
            ({"tags": {"contains": "xy"}}, [1]),
            ({"tags": {"contains": 1}}, [1]),
            ({"tags": {"contains": "missing"}}, []),
            ({"tags": {"exact": ["x", "y"]}}, [0]),
            ({"tags": {"exact": ["y", "x"]}}, []),
            ({"tags": {"within": [["x", "y"], []]}}, [0, 2]),
            ({"data": {"exact": {"b": 1, "a": [True, None]}}}, [0]),
            ({"data": {"exact": {"a": [True, None], "b": 1}}}, [0]),
            ({"data": {"exact": "text"}}, [1]),
            ({"data": {"contains": "ex"}}, [1]),
            ({"data": {"exact": 7}}, [4]),
            ({"name": {"exact": None}}, [0, 1, 2, 3, 4, 5]),
            ({"name": {"exact": None, "contains": "b"}}, [0]),
            ({"name": {"contains": "a", "within": ["ab", "AB"]}}, [0]),
            ({"name": {}}, [0, 1, 2, 3, 4, 5]),
            ({"unheard_of": {"exact": 1}}, []),
            ({"unheard_of": {"contains": ""}}, []),
            ({"unheard_of": {"within": [None]}}, []),
            ({"group": {"exact": "h"}, "number": {"within": range(2, 9)}}, [3, 5]),
            ({}, [0, 1, 2, 3, 4, 5]),
            (None, [0, 1, 2, 3, 4, 5]),
        ],
    )
    async def test_conditions(self, samples: Collection[Sample], condition: Any, expected: list[int]) -> None:
        await samples.insert(
            [
                sample(
                    0, "g", name="ab", count=0, score=0.5, flag=True, tags=["x", "y"], data={"b": 1, "a": [True, None]}
                ),
                sample(1, "h", name="AB", count=1, score=1.0, flag=False, tags=["xy", 1], data="text"),
                sample(2, "g", name="%_\\'", tags=[]),
                sample(3, "h"),
                sample(4, "g", name="caf\u00e9 \U0001f600", data=7),
                sample(5, "h", name=""),
            ]
        )
        assert await self.found(samples, condition) == expected
        assert (await samples.query(condition, None, 0)).total == len(expected)

    async def test_conditions_on_strings_that_are_hard_to_store(self, samples: Collection[Sample]) -> None:
        names = ["a\x00b", "\ud800", "\x1aab", "ab", "a\x1ab", "x\x00y\x00"]
        await samples.insert([sample(number, name=name) for number, name in enumerate(names)])
        for number, name in enumerate(names):
            assert await self.found(samples, {"name": {"exact": name}}) == [number]
            assert await self.found(samples, {"name": {"within": [name]}}) == [number]
        assert await self.found(samples, {"name": {"contains": "\x00"}}) == [0, 5]
        assert await self.found(samples, {"name": {"contains": "\ud800"}}) == [1]
        assert await self.found(samples, {"name": {"contains": "ab"}}) == [2, 3]
        assert await self.found(samples, {"name": {"contains": "b"}}) == [0, 2, 3, 4]
        assert await self.found(samples, {"name": {"contains": "\x1a"}}) == [2, 4]
        assert await self.found(samples, {"name": {"contains": "0"}}) == []

    async def test_aggregates(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number, count=number % 3, name="ab"[number % 2]) for number in range(6)])
        both: dict[str, Any] = {"count": {"exact": 0}, "name": {"exact": "a"}}
        assert await self.found(samples, both) == [0]
        assert await self.found(samples, both | {"_aggregate": "and"}) == [0]
        assert await self.found(samples, both | {"_aggregate": "or"}) == [0, 2, 3, 4]
        one_pool = {"count": {"exact": 0, "within": [1]}, "_aggregate": "or"}
        assert await self.found(samples, one_pool) == [0, 1, 3, 4]
        assert await self.found(samples, {"_aggregate": "or"}) == [0, 1, 2, 3, 4, 5]
        assert await self.found(samples, {"name": {"exact": None}, "_aggregate": "or"}) == [0, 1, 2, 3, 4, 5]
        assert await self.found(samples, {"name": {"within": []}, "_aggregate": "or"}) == []

    async def test_must_holds_in_addition_to_the_pool(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number, count=number % 3, name="ab"[number % 2]) for number in range(6)])
        pool: dict[str, Any] = {"count": {"within": [0, 1]}, "name": {"exact": "b"}, "_aggregate": "or"}
        must = {"number": {"within": [2, 3, 4, 5]}}
        assert await self.found(samples, pool | {"_must": must}) == [3, 4, 5]
        assert await self.found(samples, pool | {"_must": [must, {"name": {"exact": "b"}}]}) == [3, 5]
        assert await self.found(samples, pool | {"_must": None}) == [0, 1, 3, 4, 5]
        assert await self.found(samples, pool | {"_must": []}) == [0, 1, 3, 4, 5]
        assert await self.found(samples, {"_aggregate": "or", "_must": must}) == [2, 3, 4, 5]
        assert await self.found(samples, {"name": {"exact": None}, "_aggregate": "or", "_must": must}) == [2, 3, 4, 5]
        assert await self.found(samples, {"_must": {"name": {"exact": "a", "contains": "b"}}}) == []
        assert await self.found(samples, {"_must": {"name": {"exact": None}}}) == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize(
        ("filter_", "error"),
        [
            ({"name": {"like": "x"}}, ValueError),
            ({"name": {"like": None}}, ValueError),
            ({"name": {"exact": "x"}, "_aggregate": "xor"}, ValueError),
            ({"_aggregate": None}, ValueError),
            ({"_must": {"name": {"like": "x"}}}, ValueError),
            ({"_must": [{"name": {"exact": "a"}}, {"name": {"exact": "b"}}]}, ValueError),
            ({"name": "x"}, TypeError),
            ({"name": None}, TypeError),
            ({"_must": "name"}, TypeError),
            ({"_must": 5}, TypeError),
            ({"_must": ["name"]}, TypeError),
            ({"_must": [{"name": "x"}]}, TypeError),
        ],
    )
    @pytest.mark.parametrize("filled", [False, True])
    async def test_an_impossible_filter_is_refused(
        self, samples: Collection[Sample], filter_: Any, error: type[Exception], filled: bool
    ) -> None:
        if filled:
            await samples.insert([sample(1, name="x")])
        with pytest.raises(error):
            await samples.query(filter_)
        with pytest.raises(error):
            await samples.get(filter_)

    async def test_get_takes_the_first(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number, count=count) for number, count in enumerate([2, 1, 1, 2])])
        first = await samples.get()
        lowest = await samples.get(None, {"name": "count"})
        highest = await samples.get(None, {"name": "count", "order": "desc"})
        among = await samples.get({"number": {"within": [2, 3]}}, {"name": "count"})
        assert numbers([item for item in (first, lowest, highest, among) if item]) == [0, 1, 0, 2]

    async def test_many_values_to_look_for(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(number, name=f"n{number}") for number in range(20)])
        assert await self.found(samples, {"number": {"within": range(10, 70000)}}) == list(range(10, 20))
        names = {f"n{number}" for number in range(5, 40000)}
        assert await self.found(samples, {"name": {"within": names}}) == list(range(5, 20))

    async def test_what_is_handed_out_is_a_snapshot(self, samples: Collection[Sample]) -> None:
        given = sample(1, tags=["x"], data={"a": [1]}, extra={"deep": [1]})
        before = given.model_copy(deep=True)
        await samples.insert([given])
        given.data["a"].append(2)
        given.name = "changed"
        for read in (await samples.get(), (await samples.query()).items[0]):
            assert read == before
            assert read is not None
            read.data["a"].append(3)
            read.__pydantic_extra__["extra"]["deep"].append(2)  # type: ignore[index]
            read.tags = None
        assert await samples.get() == before
        [updated] = await samples.update([before])
        updated.data["a"].append(4)
        [upserted] = await samples.upsert([before], [])
        upserted.data["a"].append(5)
        assert await samples.get() == before
