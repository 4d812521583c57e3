"""What the workers of `bench.collections` do, as a thread or as a process of their own.

Run as a module it is one process of a crew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from bench import crew
from bench.families import Tally
from bench.payloads import rollout_input
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.records import Rollout

CHUNK: Final = 1000
"""How many records are put in, or read back, at a time where time is not measured."""


def name_of(prefix: str, number: int) -> str:
    """The name of a task."""
    return f"{prefix}-{number}"


async def insert(collections: LightningCollections, prefix: str, number: int) -> int:
    """Insert a rollout."""
    rollout = Rollout(rollout_id=name_of(prefix, number), input=rollout_input(), start_time=time.time())
    await collections.rollouts.insert([rollout])
    return number


async def dequeue(collections: LightningCollections, prefix: str, number: int) -> int:
    """Take the first entry of the queue; the number of the task that it names."""
    taken = await collections.rollout_queue.dequeue(1)
    if len(taken) != 1 or not taken[0].startswith(f"{prefix}-"):
        raise ValueError(f"the queue gave {list(taken)!r}")
    return int(taken[0].removeprefix(f"{prefix}-"))


async def inc(collections: LightningCollections, prefix: str, number: int) -> int:
    """Add one to the counter that all share; its new value."""
    return await collections.span_sequence_ids.inc(prefix, 1)


Task = Callable[[LightningCollections, str, int], Awaitable[int]]
TASKS: Final[Mapping[str, Task]] = {"insert": insert, "dequeue": dequeue, "inc": inc}
"""Each returns a number, and no two of them the same: a new task's, or the value that a counter had never had."""


async def prepare(collections: LightningCollections, benchmark: str, prefix: str, total: int) -> None:
    """Put in what the workers need to find."""
    if benchmark == "dequeue":
        names = [name_of(prefix, number) for number in range(total)]
        for first in range(0, total, CHUNK):
            await collections.rollout_queue.enqueue(names[first : first + CHUNK])


async def check(
    collections: LightningCollections, benchmark: str, prefix: str, total: int, tally: Tally, numbers: Sequence[int]
) -> None:
    """Compare what the workers were told with what is there, and take back the successes that were none."""
    seen = set(numbers)
    tally.take_back(len(numbers) - len(seen), f"numbers of {benchmark} came twice")
    first = 1 if benchmark == "inc" else 0
    strange = [number for number in seen if not first <= number < first + total]
    tally.take_back(len(strange), f"numbers of {benchmark} are none of its own, {strange[:3]} among them")
    match benchmark:
        case "insert":
            there = await _rollouts(collections)
            wanted = {name_of(prefix, number) for number in seen}
            tally.take_back(len(wanted - there), "rollouts that were inserted are not there")
            # A call may fail although the database has done what it asked.
            tally.check(len(there - wanted) <= tally.failed, "rollouts are there that nobody inserted")
        case "dequeue":
            left = await collections.rollout_queue.size()
            tally.check(left + len(seen) <= total, f"{left} entries are left although {len(seen)} were taken")
            tally.check(left + len(seen) + tally.failed >= total, f"{left} entries are left: some are lost")
        case _:
            value = await collections.span_sequence_ids.get(prefix, 0)
            lost = 0 if value is None else len(numbers) - value
            tally.check(lost <= 0, f"the counter is {value} after {len(numbers)} times one")
            tally.check(-lost <= tally.failed, f"the counter is {value} after only {len(numbers)} times one")


async def _rollouts(collections: LightningCollections) -> set[str]:
    found: set[str] = set()
    total = await collections.rollouts.size()
    for first in range(0, total, CHUNK):
        page = await collections.rollouts.query(limit=CHUNK, offset=first)
        found.update(rollout.rollout_id for rollout in page.items)
    return found


@asynccontextmanager
async def opened(database_url: str, partition: str) -> AsyncIterator[LightningCollections]:
    """The collections of a partition of a database that is prepared."""
    from lightning_sql.collections.sql import SqlCollections
    from lightning_sql.database.engine import Database

    collections = SqlCollections(Database(database_url), partition=partition)
    try:
        yield collections
    finally:
        await collections.close()


@dataclass(frozen=True, slots=True)
class Share:
    """What of a benchmark one worker does.

    Attributes:
        first: the number of its first task.
        count: how many tasks it has.
        coroutines: how many of them it does at a time.
    """

    benchmark: str
    prefix: str
    first: int
    count: int
    coroutines: int


@dataclass(slots=True)
class Done:
    """What came of a share.

    Attributes:
        tally: of its tasks.
        numbers: what those that succeeded returned.
        began: on the monotonic clock, which all processes of a machine share.
        ended: likewise.
    """

    tally: Tally
    numbers: list[int]
    began: float
    ended: float


async def contend(
    collections: LightningCollections,
    share: Share,
    ready: Callable[[], Awaitable[None]],
    advance: Callable[[int], None],
    guard: AbstractContextManager[Any] | None = None,
) -> Done:
    """Do a share, beginning when everybody is ready.

    Args:
        collections: what all contend for.
        share: what to do.
        ready: waits for the others.
        advance: told of progress.
        guard: held during each call, where the collections are not safe to use from several threads.
    """
    task = TASKS[share.benchmark]
    guard = guard or nullcontext()
    tally, numbers, pace = Tally(), list[int](), crew.Pace(advance)
    remaining = iter(range(share.first, share.first + share.count))

    async def guarded(number: int) -> int:
        # Memory never suspends while nobody else uses it, so no other coroutine of this thread can want the guard.
        with guard:
            return await task(collections, share.prefix, number)

    async def coroutine() -> None:
        for number in remaining:
            answer = await tally.timed(guarded(number))
            if answer is not None:
                numbers.append(answer)
            pace.step()
            await asyncio.sleep(0)  # what never suspends would let one coroutine do it all

    # A connection, and what is compiled at first use, is not what is measured.
    with guard:
        await collections.rollout_queue.size()
    await ready()
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(share.coroutines, share.count)):
            group.create_task(coroutine())
    ended = time.monotonic()
    pace.flush()
    return Done(tally, numbers, began, ended)


async def work(job: Mapping[str, Any], ready: Callable[[], Awaitable[None]], advance: Callable[[int], None]) -> Any:
    """A share as the job of one process."""
    async with opened(job["database_url"], job["partition"]) as collections:
        done = await contend(collections, Share(**job["share"]), ready, advance)
    return {"tally": done.tally.as_json(), "numbers": done.numbers, "began": done.began, "ended": done.ended}


if __name__ == "__main__":
    crew.member(work)
