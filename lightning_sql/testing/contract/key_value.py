"""What every `KeyValue` does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from lightning_sql.collections.protocols import KeyValue
from lightning_sql.errors import UnstorableValueError
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, assert_same

__all__ = ["KeyValueContract", "MakeKeyValue"]

MakeKeyValue: TypeAlias = Callable[[], Awaitable[KeyValue[str, Any]]]
"""Makes an empty mapping from strings to JSON values; each call makes another one."""


@pytest.mark.asyncio
class KeyValueContract:
    """Needs the fixture `make_key_value`, a `MakeKeyValue`."""

    @pytest.fixture
    async def values(self, make_key_value: MakeKeyValue) -> KeyValue[str, Any]:
        """An empty mapping."""
        return await make_key_value()

    async def test_a_missing_key(self, values: KeyValue[str, Any]) -> None:
        assert not await values.has("k")
        assert await values.get("k") is None
        assert await values.get("k", 5) == 5
        assert await values.pop("k") is None
        assert await values.pop("k", 6) == 6
        assert await values.size() == 0
        assert type(values).__name__ in repr(values)
        assert values.collection_name

    async def test_set_get_and_pop(self, values: KeyValue[str, Any]) -> None:
        await values.set("k", 1)
        await values.set("other", "text")
        await values.set("k", 2)
        assert (await values.has("k"), await values.get("k", 9), await values.size()) == (True, 2, 2)
        assert await values.pop("k", 9) == 2
        assert (await values.has("k"), await values.get("other"), await values.size()) == (False, "text", 1)

    async def test_none_is_a_value(self, values: KeyValue[str, Any]) -> None:
        await values.set("k", None)
        assert await values.has("k")
        assert await values.get("k", 5) is None
        assert await values.pop("k", 5) is None
        assert not await values.has("k")

    async def test_mappings_are_apart(self, values: KeyValue[str, Any], make_key_value: MakeKeyValue) -> None:
        other = await make_key_value()
        await values.set("k", 1)
        assert not await other.has("k")
        assert await other.inc("k", 5) == 5
        assert await values.get("k") == 1

    # A bare minus zero is a number to count with, and may be kept as zero, to which it is equal.
    @pytest.mark.parametrize("payload", [name for name in ODD_PAYLOADS if name != "minus zero"])
    async def test_odd_values_come_back_exactly(self, values: KeyValue[str, Any], payload: str) -> None:
        await values.set("k", ODD_PAYLOADS[payload])
        assert_same(await values.get("k"), ODD_PAYLOADS[payload])
        assert_same(await values.pop("k"), ODD_PAYLOADS[payload])

    @pytest.mark.parametrize("key", ODD_STRINGS)
    async def test_an_odd_key_is_kept_or_refused(self, values: KeyValue[str, Any], key: str) -> None:
        await values.set("other", 1)
        try:
            await values.set(ODD_STRINGS[key], 2)
        except UnstorableValueError:
            assert not await values.has(ODD_STRINGS[key])
            assert await values.size() == 1
        else:
            assert await values.has(ODD_STRINGS[key])
            assert await values.inc(ODD_STRINGS[key], 1) == 3
            assert await values.pop(ODD_STRINGS[key]) == 3
            assert await values.get("other") == 1

    async def test_values_are_handed_out_as_snapshots(self, values: KeyValue[str, Any]) -> None:
        given = [1]
        await values.set("k", given)
        given.append(2)
        read: Any = await values.get("k")
        read.append(3)
        assert await values.get("k") == [1]

    @pytest.mark.parametrize(
        ("start", "amount", "expected"),
        [
            (None, 3, 3),
            (None, 2.5, 2.5),
            (1, 2, 3),
            (5, -7, -2),
            (1, 0.5, 1.5),
            (1.5, 2, 3.5),
            (1.5, 0.5, 2.0),
            (3, 0, 3),
            (2**63 - 2, 1, 2**63 - 1),
            (-(2**63) + 1, -1, -(2**63)),
            (2**53, 1, 2**53 + 1),
            (2**53 + 1, 0.0, float(2**53)),
            (0.1, 0.2, 0.1 + 0.2),
        ],
    )
    async def test_inc(self, values: KeyValue[str, Any], start: Any, amount: Any, expected: Any) -> None:
        if start is not None:
            await values.set("k", start)
        assert_same(await values.inc("k", amount), expected)
        assert_same(await values.get("k"), expected)

    @pytest.mark.parametrize(
        ("start", "value", "expected"),
        [
            (None, 3, 3),
            (None, -3, -3),
            (None, 2.5, 2.5),
            (5, 3, 5),
            (3, 5, 5),
            (-5, -3, -3),
            (1, 1.5, 1.5),
            (2.5, 2, 2.5),
            (2.5, 3, 3),
            (2**53, 2**53 + 1, 2**53 + 1),
            (2**53 + 1, float(2**53), 2**53 + 1),
            (2**63 - 1, 1, 2**63 - 1),
        ],
    )
    async def test_chmax(self, values: KeyValue[str, Any], start: Any, value: Any, expected: Any) -> None:
        if start is not None:
            await values.set("k", start)
        assert_same(await values.chmax("k", value), expected)
        assert_same(await values.get("k"), expected)

    @pytest.mark.parametrize("method", ["inc", "chmax"])
    @pytest.mark.parametrize("wrong", [True, False, "1", None, [1], {}, b"1", math.nan, math.inf])
    async def test_what_is_no_number_is_refused(self, values: KeyValue[str, Any], method: str, wrong: Any) -> None:
        with pytest.raises(TypeError):
            await getattr(values, method)("k", wrong)
        assert not await values.has("k")
        await values.set("k", 1)
        with pytest.raises(TypeError):
            await getattr(values, method)("k", wrong)
        assert_same(await values.get("k"), 1)

    @pytest.mark.parametrize("method", ["inc", "chmax"])
    @pytest.mark.parametrize("stored", [True, False, "1", None, [1], {"a": 1}, math.nan, -math.inf])
    async def test_a_stored_value_that_is_no_number_is_left(
        self, values: KeyValue[str, Any], method: str, stored: Any
    ) -> None:
        await values.set("k", stored)
        for amount in (1, 2.5):
            with pytest.raises(TypeError):
                await getattr(values, method)("k", amount)
        assert_same(await values.get("k"), stored)

    @pytest.mark.parametrize(
        ("method", "start", "value"),
        [
            ("inc", 2**63 - 1, 1),
            ("inc", -(2**63), -1),
            ("inc", 2**62, 2**62),
            ("inc", 1, 2**63),
            ("inc", None, 2**64),
            ("chmax", 1, 2**63),
            ("chmax", None, 2**63),
            ("chmax", None, -(2**63) - 1),
            ("chmax", 1, -(2**63) - 1),
        ],
    )
    async def test_what_does_not_fit_64_bits_is_refused(
        self, values: KeyValue[str, Any], method: str, start: Any, value: int
    ) -> None:
        if start is not None:
            await values.set("k", start)
        with pytest.raises(UnstorableValueError):
            await getattr(values, method)("k", value)
        assert_same(await values.get("k"), start)

    async def test_every_concurrent_inc_gets_its_own_value(self, values: KeyValue[str, Any]) -> None:
        results = await asyncio.gather(*(values.inc(f"k{number % 2}", 1) for number in range(100)))
        assert sorted(results) == sorted([*range(1, 51), *range(1, 51)])
        assert [await values.get(key) for key in ("k0", "k1")] == [50, 50]

    async def test_concurrent_chmax_never_lowers(self, values: KeyValue[str, Any]) -> None:
        offers = [(number * 37) % 101 for number in range(101)]
        results = await asyncio.gather(*(values.chmax("k", offer) for offer in offers))
        assert all(result >= offer for result, offer in zip(results, offers, strict=True))
        assert await values.get("k") == 100

    async def test_only_one_pop_gets_the_value(self, values: KeyValue[str, Any]) -> None:
        await values.set("k", "v")
        results: list[Any] = await asyncio.gather(*(values.pop("k", "gone") for _ in range(20)))
        assert sorted(results) == ["gone"] * 19 + ["v"]
