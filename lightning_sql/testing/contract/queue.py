"""What every `Queue` does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import pytest

from lightning_sql.collections.protocols import Queue
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, Plain, assert_same

__all__ = ["MakeQueue", "QueueContract"]

MakeQueue: TypeAlias = Callable[[type[Any]], Awaitable[Queue[Any]]]
"""Makes an empty queue of items of a type: `str` or a pydantic model; each call makes another one."""


async def drained(queue: Queue[Any]) -> list[Any]:
    """Everything in a queue, taken out one by one."""
    items: list[Any] = []
    while taken := await queue.dequeue():
        assert len(taken) == 1
        items += taken
    return items


@pytest.mark.asyncio
class QueueContract:
    """Needs the fixture `make_queue`, a `MakeQueue`."""

    @pytest.fixture
    async def queue(self, make_queue: MakeQueue) -> Queue[str]:
        """An empty queue of strings."""
        return await make_queue(str)

    async def test_it_says_what_it_holds(self, queue: Queue[str], make_queue: MakeQueue) -> None:
        assert queue.item_type() is str
        assert (await make_queue(Plain)).item_type() is Plain
        assert type(queue).__name__ in repr(queue)
        assert "str" in repr(queue)
        assert queue.collection_name

    async def test_an_empty_queue(self, queue: Queue[str]) -> None:
        assert list(await queue.dequeue()) == []
        assert list(await queue.peek(3)) == []
        assert list(await queue.enqueue([])) == []
        assert not await queue.has("a")
        assert await queue.size() == 0

    async def test_first_in_first_out(self, queue: Queue[str]) -> None:
        assert list(await queue.enqueue(["b", "a"])) == ["b", "a"]
        assert list(await queue.enqueue(("c",))) == ["c"]
        assert list(await queue.dequeue(2)) == ["b", "a"]
        await queue.enqueue(["a"])
        assert list(await queue.dequeue(10)) == ["c", "a"]
        assert await queue.size() == 0

    async def test_an_item_may_stand_in_it_several_times(self, queue: Queue[str]) -> None:
        await queue.enqueue(["a", "b", "a", "a"])
        assert await queue.size() == 4
        assert list(await queue.dequeue()) == ["a"]
        assert await queue.has("a")
        assert await drained(queue) == ["b", "a", "a"]
        assert not await queue.has("a")

    async def test_peek_takes_nothing(self, queue: Queue[str]) -> None:
        await queue.enqueue(["a", "b", "c"])
        assert list(await queue.peek()) == ["a"]
        assert list(await queue.peek(2)) == ["a", "b"]
        assert list(await queue.peek(9)) == ["a", "b", "c"]
        assert await queue.size() == 3
        assert await drained(queue) == ["a", "b", "c"]

    @pytest.mark.parametrize("limit", [0, -1, -5])
    async def test_a_limit_below_one_is_nothing(self, queue: Queue[str], limit: int) -> None:
        await queue.enqueue(["a"])
        assert list(await queue.dequeue(limit)) == []
        assert list(await queue.peek(limit)) == []
        assert await queue.size() == 1

    async def test_discard_removes_every_equal_entry(self, queue: Queue[str]) -> None:
        await queue.enqueue(["a", "b", "a", "c", "d"])
        await queue.discard(["a", "d", "never there"])
        assert list(await queue.peek(9)) == ["b", "c"]
        await queue.discard([])
        await queue.enqueue(["a"])
        assert await drained(queue) == ["b", "c", "a"]

    async def test_wrong_types_are_refused(self, queue: Queue[str], make_queue: MakeQueue) -> None:
        plain = await make_queue(Plain)
        target: Queue[Any]
        wrong: Any
        pairs: list[tuple[Any, Any]] = [(queue, 1), (queue, None), (queue, b"a"), (plain, "a"), (plain, {"key": "a"})]
        for target, wrong in pairs:
            right: Any = "a" if target is queue else Plain(key="a")
            await target.enqueue([right])
            for call in (target.has(wrong), target.enqueue([right, wrong]), target.discard([right, wrong])):
                with pytest.raises(TypeError):
                    await call
            assert await drained(target) == [right]

    async def test_models_are_equal_by_value(self, make_queue: MakeQueue) -> None:
        queue = await make_queue(Plain)
        item = Plain(key="a", value={"x": [1, None], "y": 2.5})
        await queue.enqueue([item, Plain(key="b"), item])
        assert await queue.has(Plain(key="a", value={"x": [1, None], "y": 2.5}))
        assert await queue.has(Plain(key="a", value={"y": 2.5, "x": [1, None]}))
        assert not await queue.has(Plain(key="a", value={"x": [1], "y": 2.5}))
        assert list(await queue.peek()) == [item]
        await queue.discard([Plain(key="a", value={"y": 2.5, "x": [1, None]})])
        assert await drained(queue) == [Plain(key="b")]

    async def test_models_are_handed_out_as_snapshots(self, make_queue: MakeQueue) -> None:
        queue = await make_queue(Plain)
        item = Plain(key="a", value=[1])
        await queue.enqueue([item])
        item.value.append(2)
        [peeked] = await queue.peek()
        peeked.value.append(3)
        assert await drained(queue) == [Plain(key="a", value=[1])]

    @pytest.mark.parametrize("payload", ODD_PAYLOADS)
    async def test_odd_payloads_come_back_exactly(self, make_queue: MakeQueue, payload: str) -> None:
        queue = await make_queue(Plain)
        item = Plain(key="a", value=ODD_PAYLOADS[payload])
        await queue.enqueue([item])
        assert_same(list(await queue.peek()), [item])
        assert_same(await drained(queue), [item])

    @pytest.mark.parametrize("text", ODD_STRINGS)
    async def test_odd_strings_come_back_exactly(self, queue: Queue[str], text: str) -> None:
        await queue.enqueue(["other", ODD_STRINGS[text]])
        assert await queue.has(ODD_STRINGS[text])
        assert_same(await drained(queue), ["other", ODD_STRINGS[text]])
        await queue.enqueue([ODD_STRINGS[text], "other"])
        await queue.discard([ODD_STRINGS[text]])
        assert await drained(queue) == ["other"]

    async def test_thousands_in_one_call(self, queue: Queue[str]) -> None:
        items = [f"item {number % 4000}" for number in range(5000)]
        assert list(await queue.enqueue(items)) == items
        assert await queue.size() == 5000
        assert list(await queue.dequeue(4500)) == items[:4500]
        await queue.enqueue(items[:4500])
        await queue.discard(items[1000:])
        assert list(await queue.peek(9000)) == []

    async def test_concurrent_dequeues_share_nothing(self, queue: Queue[str]) -> None:
        items = [str(number) for number in range(200)]
        await queue.enqueue(items)

        async def take(limit: int) -> list[str]:
            mine: list[str] = []
            while taken := await queue.dequeue(limit):
                mine += taken
            return mine

        shares: Sequence[list[str]] = await asyncio.gather(*(take(1 + number % 4) for number in range(16)))
        assert sorted(item for share in shares for item in share) == sorted(items)
        for share in shares:
            assert share == sorted(share, key=int)

    async def test_concurrent_enqueues_lose_nothing(self, queue: Queue[str]) -> None:
        await asyncio.gather(*(queue.enqueue([f"{number} a", f"{number} b"]) for number in range(50)))
        taken = await drained(queue)
        assert sorted(taken) == sorted(f"{number} {half}" for number in range(50) for half in "ab")
        for number in range(50):
            assert taken.index(f"{number} a") < taken.index(f"{number} b")
