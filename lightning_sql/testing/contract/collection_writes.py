"""What every `Collection` does when it is written: keys, merging, all or nothing, exact payloads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_sql.collections.protocols import Collection
from lightning_sql.errors import (
    DuplicatedPrimaryKeyError,
    InvalidRequestError,
    LightningError,
    RecordNotFoundError,
    UnstorableValueError,
)
from lightning_sql.testing.contract.collection_reads import MakeCollection, numbers
from lightning_sql.testing.samples import (
    ODD_PAYLOADS,
    ODD_STRINGS,
    SAMPLE_KEYS,
    Plain,
    Sample,
    assert_same,
    sample,
)

__all__ = ["CollectionWrites"]

MANY = 3000


class LargerSample(Sample):
    """An item of a subclass, which a collection takes for its base."""

    more: str = "more"


async def contents(samples: Collection[Any]) -> list[Any]:
    """Everything in a collection."""
    return list((await samples.query()).items)


class CollectionWrites:
    """Needs the fixture `make_collection`, a `MakeCollection`."""

    @pytest.fixture
    async def samples(self, make_collection: MakeCollection) -> Collection[Sample]:
        """An empty collection of `Sample`."""
        return await make_collection(Sample, SAMPLE_KEYS)

    async def refused(self, samples: Collection[Sample], call: Any, error: type[Exception]) -> None:
        """A call raises, and leaves everything as it was."""
        before = await contents(samples)
        with pytest.raises(error):
            await call
        assert await contents(samples) == before

    async def test_a_collection_needs_a_key(self, make_collection: MakeCollection) -> None:
        with pytest.raises(ValueError, match="key"):
            await make_collection(Sample, [])

    async def test_collections_are_apart(self, make_collection: MakeCollection) -> None:
        one = await make_collection(Plain, ["key"])
        other = await make_collection(Plain, ["key"])
        await one.insert([Plain(key="a", value=1)])
        await other.insert([Plain(key="a", value=2)])
        assert await contents(one) == [Plain(key="a", value=1)]
        assert await contents(other) == [Plain(key="a", value=2)]

    # Insert

    async def test_the_whole_key_identifies(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, "a"), sample(2, "a"), sample(1, "b")])
        assert await samples.size() == 3
        await self.refused(samples, samples.insert([sample(2, "b"), sample(1, "b")]), DuplicatedPrimaryKeyError)
        await self.refused(samples, samples.insert([sample(7), sample(8), sample(7)]), DuplicatedPrimaryKeyError)
        assert issubclass(DuplicatedPrimaryKeyError, ValueError)

    @pytest.mark.parametrize("method", ["insert", "update", "upsert", "delete"])
    async def test_wrong_types_are_refused(self, samples: Collection[Sample], method: str) -> None:
        await samples.insert([sample(1)])
        items: list[Any]
        for items in ([Plain(key="a")], [sample(1, name="x"), {"group": "g", "number": 1}], [None]):
            await self.refused(samples, getattr(samples, method)(items), TypeError)

    @pytest.mark.parametrize("method", ["insert", "update", "upsert", "delete"])
    async def test_nothing_to_do(self, samples: Collection[Sample], method: str) -> None:
        await samples.insert([sample(1)])
        result = await getattr(samples, method)([])
        assert result in ([], None)
        assert await contents(samples) == [sample(1)]

    async def test_any_sequence_will_do(self, samples: Collection[Sample]) -> None:
        await samples.insert((sample(1), sample(2)))
        page = await samples.query()
        await samples.delete(page.items)
        await samples.insert(page)  # type: ignore[arg-type]
        assert list(await samples.update(tuple(page.items))) == page.items
        assert numbers(await contents(samples)) == [1, 2]

    async def test_what_a_subclass_adds_is_left_out(self, samples: Collection[Sample]) -> None:
        await samples.insert([LargerSample(group="g", number=1, name="x")])
        assert_same(await samples.get(), sample(1, name="x"))

    async def test_extra_fields_survive(self, samples: Collection[Sample]) -> None:
        extras: dict[str, Any] = {"zeta": 1, "alpha": {"nested": [None]}, "seq": "s", "extra": 2, "partition_id": 3}
        await samples.insert([sample(1, **extras), sample(2)])
        first, second = await contents(samples)
        assert_same(first, sample(1, **extras))
        assert_same(second, sample(2))
        [merged] = await samples.update([sample(1, name="x", other=True)], ["name"])
        assert_same(merged, sample(1, name="x", **extras))
        [replaced] = await samples.update([sample(1, other=True)])
        assert_same(replaced, sample(1, other=True))
        assert_same(await samples.get(), sample(1, other=True))

    @pytest.mark.parametrize("payload", ODD_PAYLOADS)
    async def test_odd_payloads_come_back_exactly(self, samples: Collection[Sample], payload: str) -> None:
        value = ODD_PAYLOADS[payload]
        item = sample(1, data=value, tags=[value], extra=value)
        await samples.insert([item, sample(2)])
        assert_same(await samples.get(), item)
        for field in ("data", "tags", "extra"):
            assert_same((await samples.query()).items[0].model_dump()[field], item.model_dump()[field])
        [updated] = await samples.update([sample(2, data=value)], ["data"])
        assert_same(updated, sample(2, data=value))
        [known, new] = await samples.upsert([sample(2, tags=[value]), sample(3, extra=value)], ["tags"])
        assert_same(known, sample(2, data=value, tags=[value]))
        assert_same(new, sample(3, extra=value))
        assert_same(await contents(samples), [item, known, new])

    @pytest.mark.parametrize("text", ODD_STRINGS)
    async def test_odd_text_columns_come_back_exactly(self, samples: Collection[Sample], text: str) -> None:
        await samples.insert([sample(1, name=ODD_STRINGS[text]), sample(2)])
        await samples.update([sample(2, name=ODD_STRINGS[text])], ["name"])
        assert_same(await contents(samples), [sample(number, name=ODD_STRINGS[text]) for number in (1, 2)])

    @pytest.mark.parametrize("key", ODD_STRINGS)
    async def test_an_odd_key_is_kept_or_refused(self, samples: Collection[Sample], key: str) -> None:
        item = sample(1, group=ODD_STRINGS[key], name="x")
        try:
            await samples.insert([sample(2), item])
        except UnstorableValueError:
            assert await contents(samples) == []
            await self.refused(samples, samples.update([item]), LightningError)
            await self.refused(samples, samples.delete([item]), LightningError)
        else:
            assert_same(await samples.get({"group": {"exact": ODD_STRINGS[key]}}), item)
            await samples.delete([item])
            assert await contents(samples) == [sample(2)]

    # Without minus zero: a numeric column of SQLite keeps it as zero, to which it is equal.
    @pytest.mark.parametrize("value", [0.1, 1e308, 5e-324, 0.0, math.inf, -math.inf, 1.0, 2.0**63])
    async def test_floats_are_kept_to_the_last_bit(self, samples: Collection[Sample], value: float) -> None:
        await samples.insert([sample(1, score=value, seen_time=value)])
        assert_same(await samples.get(), sample(1, score=value, seen_time=value))

    @pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0])
    async def test_integers_of_64_bits_are_kept(self, samples: Collection[Sample], value: int) -> None:
        await samples.insert([sample(value, count=value)])
        assert_same(await samples.get(), sample(value, count=value))

    @pytest.mark.parametrize(
        "fields", [{"count": 2**63}, {"count": -(2**63) - 1}, {"score": math.nan}, {"seen_time": math.nan}]
    )
    async def test_what_a_column_cannot_hold_is_kept_or_refused(
        self, samples: Collection[Sample], fields: dict[str, Any]
    ) -> None:
        await samples.insert([sample(1)])
        try:
            await samples.upsert([sample(2), sample(1, **fields)])
        except UnstorableValueError:
            assert await contents(samples) == [sample(1)]
            await self.refused(samples, samples.update([sample(1, **fields)], list(fields)), UnstorableValueError)
            await self.refused(samples, samples.insert([sample(3, **fields)]), UnstorableValueError)
        else:
            assert_same(await contents(samples), [sample(1, **fields), sample(2)])

    # Update

    async def test_update_replaces_the_whole_item(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="a", count=1, tags=["x"]), sample(2, name="b")])
        results = await samples.update([sample(2, count=5), sample(1, name="c")])
        assert list(results) == [sample(2, count=5), sample(1, name="c")]
        assert await contents(samples) == [sample(1, name="c"), sample(2, count=5)]

    async def test_update_fields_merges_and_answers_complete_items(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="a", count=1, data={"k": 1}), sample(2, name="b", count=2, flag=True)])
        skeletons = [sample(2, name="new", count=-1, tags=["t"]), sample(1, name=None, count=-1, tags=None)]
        results = await samples.update(skeletons, ["name", "tags", "number", "group", "name"])
        expected = [sample(2, name="new", count=2, flag=True, tags=["t"]), sample(1, count=1, data={"k": 1})]
        assert list(results) == expected
        assert await contents(samples) == expected[::-1]

    @pytest.mark.parametrize("field", ["name", "count", "score", "seen_time", "flag", "tags", "data"])
    async def test_each_field_can_be_updated_alone_and_to_null(self, samples: Collection[Sample], field: str) -> None:
        full: dict[str, Any] = {
            "name": "n", "count": 1, "score": 1.5, "seen_time": 2.5, "flag": True, "tags": ["t"], "data": {"d": 1}
        }  # fmt: skip
        changed: dict[str, Any] = {
            "name": "m",
            "count": 2,
            "score": 2.0,
            "seen_time": 3.0,
            "flag": False,
            "tags": [],
            "data": None,
        }
        await samples.insert([sample(1, **full)])
        nothing: dict[str, Any] = {field: None}
        for change in ({field: changed[field]}, nothing, {field: full[field]}):
            [result] = await samples.update([sample(1, **change)], [field])
            assert_same(result, sample(1, **(full | change)))
            assert_same(await samples.get(), result)

    async def test_update_of_no_fields_changes_nothing(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="a"), sample(2)])
        assert list(await samples.update([sample(2, name="x"), sample(1)], [])) == [sample(2), sample(1, name="a")]
        assert await contents(samples) == [sample(1, name="a"), sample(2)]

    @pytest.mark.parametrize("fields", [None, ["name"], []])
    async def test_an_unknown_key_leaves_everything(self, samples: Collection[Sample], fields: Any) -> None:
        await samples.insert([sample(1), sample(2)])
        items = [sample(1, name="x"), sample(3, name="x"), sample(2, name="x")]
        await self.refused(samples, samples.update(items, fields), RecordNotFoundError)
        await self.refused(samples, samples.update([sample(1, "other")], fields), RecordNotFoundError)
        await self.refused(samples, samples.delete([sample(1), sample(3)]), RecordNotFoundError)
        assert issubclass(RecordNotFoundError, ValueError)

    async def test_unknown_fields_cannot_be_updated(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1)])
        await self.refused(samples, samples.update([sample(1, x=1)], ["name", "x"]), InvalidRequestError)
        await self.refused(samples, samples.upsert([sample(2)], ["missing"]), InvalidRequestError)

    @pytest.mark.parametrize("method", ["update", "upsert"])
    async def test_the_same_key_twice_is_applied_in_order(self, samples: Collection[Sample], method: str) -> None:
        write = getattr(samples, method)
        await samples.insert([sample(1, name="a", count=1), sample(2)])
        results = await write([sample(1, name="b", count=2), sample(2, name="x"), sample(1, name="c")], ["name"])
        assert list(results) == [sample(1, name="b", count=1), sample(2, name="x"), sample(1, name="c", count=1)]
        assert await contents(samples) == [sample(1, name="c", count=1), sample(2, name="x")]
        results = await write([sample(1, count=5), sample(1, name="d")])
        assert list(results) == [sample(1, count=5), sample(1, name="d")]
        assert await contents(samples) == [sample(1, name="d"), sample(2, name="x")]

    # Upsert

    async def test_upsert_inserts_whole_items_and_updates_the_others(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="a", count=1)])
        items = [sample(2, name="b", count=2, more=1), sample(1, name="c", count=9)]
        assert list(await samples.upsert(items, ["name"])) == [items[0], sample(1, name="c", count=1)]
        assert await contents(samples) == [sample(1, name="c", count=1), items[0]]
        assert list(await samples.upsert([sample(3), sample(1, flag=True)])) == [sample(3), sample(1, flag=True)]
        assert await contents(samples) == [sample(1, flag=True), items[0], sample(3)]

    async def test_upsert_of_no_fields_gets_or_inserts(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="kept")])
        items = [sample(2, name="new"), sample(1, name="ignored"), sample(2, name="ignored")]
        expected = [sample(2, name="new"), sample(1, name="kept"), sample(2, name="new")]
        assert list(await samples.upsert(items, [])) == expected
        assert await contents(samples) == [sample(1, name="kept"), sample(2, name="new")]

    async def test_upsert_inserts_in_the_order_given(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(5)])
        await samples.upsert([sample(number, group) for group, number in (("g", 9), ("b", 1), ("g", 5), ("a", 7))])
        await samples.upsert([sample(3), sample(2), sample(3), sample(1)], ["name"])
        assert numbers(await contents(samples)) == [5, 9, 1, 7, 3, 2, 1]

    async def test_a_new_key_twice_is_inserted_then_updated(self, samples: Collection[Sample]) -> None:
        results = await samples.upsert([sample(1, name="a", count=1), sample(1, name="b", count=2)], ["name"])
        assert list(results) == [sample(1, name="a", count=1), sample(1, name="b", count=1)]
        assert await contents(samples) == [sample(1, name="b", count=1)]

    # Delete

    async def test_delete_goes_by_the_key(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1, name="a"), sample(2), sample(1, "other")])
        await samples.delete([sample(1, name="whatever it says")])
        assert await contents(samples) == [sample(2), sample(1, "other")]
        await self.refused(samples, samples.delete([sample(2), sample(2)]), RecordNotFoundError)

    # Many

    async def test_thousands_in_one_call(self, samples: Collection[Sample]) -> None:
        items = [sample(number, name=f"n{number}", count=number, extra=number) for number in range(MANY)]
        await samples.insert(items)
        assert await contents(samples) == items
        await self.refused(samples, samples.insert([*items[1:], sample(-1)]), DuplicatedPrimaryKeyError)
        backwards = [sample(number, name=f"m{number}") for number in reversed(range(MANY))]
        results = await samples.update(backwards, ["name"])
        merged = [sample(number, name=f"m{number}", count=number, extra=number) for number in range(MANY)]
        assert list(results) == merged[::-1]
        mixed = [sample(number, name="z") for number in range(MANY // 2, MANY + MANY // 2)]
        results = await samples.upsert(mixed, ["name"])
        assert (
            list(results)
            == [item.model_copy(update={"name": "z"}) for item in merged[MANY // 2 :]] + mixed[MANY // 2 :]
        )
        assert [item.number for item in await contents(samples)] == list(range(MANY + MANY // 2))
        results = await samples.update([sample(number) for number in range(MANY)])
        assert list(results) == [sample(number) for number in range(MANY)]
        await self.refused(samples, samples.delete([*mixed, sample(-1)]), RecordNotFoundError)
        await samples.delete(mixed)
        assert numbers(await contents(samples)) == list(range(MANY // 2))

    # Concurrency

    async def test_one_of_many_inserts_of_a_key_wins(self, samples: Collection[Sample]) -> None:
        outcomes = await asyncio.gather(
            *(samples.insert([sample(1, count=number), sample(100 + number)]) for number in range(20)),
            return_exceptions=True,
        )
        assert sum(outcome is None for outcome in outcomes) == 1
        assert sum(isinstance(outcome, DuplicatedPrimaryKeyError) for outcome in outcomes) == 19
        winner = outcomes.index(None)
        assert await contents(samples) == [sample(1, count=winner), sample(100 + winner)]

    async def test_many_get_or_inserts_agree(self, samples: Collection[Sample]) -> None:
        answers: Sequence[Sequence[Sample]] = await asyncio.gather(
            *(samples.upsert([sample(1, count=number)], []) for number in range(20))
        )
        assert all(answer == answers[0] for answer in answers)
        assert await contents(samples) == list(answers[0])

    async def test_concurrent_updates_of_different_fields_all_stay(self, samples: Collection[Sample]) -> None:
        await samples.insert([sample(1)])
        changes: dict[str, Any] = {"name": "n", "count": 1, "score": 0.5, "flag": True, "tags": ["t"], "data": [1]}
        await asyncio.gather(
            *(samples.update([sample(1, **{field: value})], [field]) for field, value in changes.items())
        )
        assert await samples.get() == sample(1, **changes)
