"""Transactions in SQL: callbacks that read and then write lose nothing, and nobody sees what is not committed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.collections.sql import SqlCollections
from lightning_sql.database.engine import Database
from lightning_sql.errors import DuplicatedPrimaryKeyError
from lightning_sql.records import Rollout, Worker
from tests.backends import POSTGRES

PATIENCE = 60.0
CALLBACKS = 6


class Shared:
    """Several servers on one partition of a database: collections with connections of their own."""

    def __init__(self, database_url: str, partition: str) -> None:
        self._opened: list[SqlCollections] = []
        self._open = lambda: SqlCollections(Database(database_url), partition=partition)

    def another(self) -> SqlCollections:
        self._opened.append(self._open())
        return self._opened[-1]

    async def close(self) -> None:
        for collections in self._opened:
            await collections.close()


@pytest.fixture(params=["sqlite", POSTGRES])
async def shared(request: pytest.FixtureRequest, database_of: Callable[[str], str]) -> AsyncIterator[Shared]:
    shared = Shared(database_of(request.param), request.node.name)
    yield shared
    await shared.close()


@pytest.fixture
def collections(shared: Shared) -> SqlCollections:
    return shared.another()


async def add_one(inside: LightningCollections) -> None:
    """Read, let others run, then write what follows from what was read."""
    worker = await inside.workers.get({"worker_id": {"exact": "counter"}})
    assert worker is not None
    assert worker.heartbeat_stats is not None
    await asyncio.sleep(0.001)
    worker.heartbeat_stats["count"] += 1
    await inside.workers.update([worker], ["heartbeat_stats"])


async def count(collections: LightningCollections) -> int:
    worker = await collections.workers.get({"worker_id": {"exact": "counter"}})
    assert worker is not None
    assert worker.heartbeat_stats is not None
    return worker.heartbeat_stats["count"]


@pytest.mark.parametrize("labels", [None, ("workers",), ()])
@pytest.mark.parametrize("servers", [1, CALLBACKS])
async def test_concurrent_callbacks_that_read_and_then_write_are_all_applied(
    shared: Shared, servers: int, labels: Any
) -> None:
    """Without labels nothing excludes them: then it is their conflicts that are found, and they that run again."""
    several = [shared.another() for _ in range(servers)]
    await several[0].workers.insert([Worker(worker_id="counter", heartbeat_stats={"count": 0})])
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            *(
                several[number % servers].execute(add_one, mode="rw", commit=True, snapshot=True, labels=labels)
                for number in range(CALLBACKS)
            )
        )
    assert await count(several[0]) == CALLBACKS


async def test_labels_exclude_writers_of_other_servers(shared: Shared) -> None:
    """By waiting, not by conflict: `atomic` cannot run its body again."""
    several = [shared.another() for _ in range(CALLBACKS)]
    await several[0].workers.insert([Worker(worker_id="counter", heartbeat_stats={"count": 0})])

    async def count_up(collections: SqlCollections) -> None:
        for _ in range(3):
            async with collections.atomic(mode="rw", labels=["workers"]) as inside:
                await add_one(inside)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(count_up(collections) for collections in several))
    assert await count(several[0]) == 3 * CALLBACKS


async def test_an_insert_that_depends_on_what_was_read_is_made_once(collections: SqlCollections) -> None:
    """What nobody has written yet cannot be locked: only a snapshot that is checked at the end finds this."""

    async def insert_if_none(inside: LightningCollections, number: int) -> bool:
        if await inside.rollouts.size():
            return False
        await asyncio.sleep(0.001)
        await inside.rollouts.insert([Rollout(rollout_id=f"ro-{number}", input=number, start_time=0.0)])
        return True

    async with asyncio.timeout(PATIENCE):
        made = await asyncio.gather(
            *(
                collections.execute(
                    lambda inside, number=number: insert_if_none(inside, number),
                    mode="rw",
                    commit=True,
                    snapshot=True,
                    labels=(),
                )
                for number in range(CALLBACKS)
            )
        )
    assert sum(made) == 1
    assert await collections.rollouts.size() == 1


@pytest.mark.slow
async def test_a_callback_that_lost_runs_again(prepared_postgres: str) -> None:
    collections = SqlCollections(Database(prepared_postgres), partition="a callback that lost")
    await collections.workers.insert([Worker(worker_id="counter", heartbeat_stats={"count": 0})])
    together = asyncio.Barrier(CALLBACKS)
    runs = [0] * CALLBACKS

    async def read_together(inside: LightningCollections, number: int) -> None:
        runs[number] += 1
        await inside.workers.get()
        if runs[number] == 1:
            await together.wait()
        await add_one(inside)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            *(
                collections.execute(
                    lambda inside, number=number: read_together(inside, number),
                    mode="rw",
                    commit=True,
                    snapshot=True,
                    labels=(),
                )
                for number in range(CALLBACKS)
            )
        )
    assert await count(collections) == CALLBACKS
    assert sorted(runs)[1] > 1, "of several that read the same state, one at most can have been first"
    await collections.close()


async def test_an_error_of_the_callback_is_not_tried_again(collections: SqlCollections) -> None:
    runs = 0

    async def fail(inside: LightningCollections) -> None:
        nonlocal runs
        runs += 1
        await inside.workers.insert([Worker(worker_id="w"), Worker(worker_id="w")])

    with pytest.raises(DuplicatedPrimaryKeyError):
        await collections.execute(fail, mode="rw", commit=True, snapshot=True)
    assert runs == 1


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("kind", [TimeoutError, ConnectionRefusedError, FileNotFoundError, ValueError])
async def test_what_a_callback_raises_is_passed_on_as_it_is(
    collections: SqlCollections, kind: type[Exception], commit: bool
) -> None:
    """Its timeouts and connections are not the database's, and no reason to run it again."""
    raised = kind("of the callback's own")
    runs = 0

    async def fail(inside: LightningCollections) -> None:
        nonlocal runs
        runs += 1
        await inside.workers.insert([Worker(worker_id="w")])
        try:
            await inside.workers.insert([Worker(worker_id="w")])
        except DuplicatedPrimaryKeyError as error:
            raise raised from error

    with pytest.raises(kind) as caught:
        await collections.execute(fail, mode="rw", commit=commit)
    assert (caught.value, runs) == (raised, 1)
    with pytest.raises(kind) as caught:
        async with collections.atomic() as inside:
            await fail(inside)
    assert caught.value is raised
    assert await collections.workers.size() == 0


async def test_nobody_sees_what_is_not_committed(shared: Shared) -> None:
    writer, other = shared.another(), shared.another()
    await writer.workers.insert([Worker(worker_id="w")])
    async with asyncio.timeout(PATIENCE):
        async with writer.atomic(mode="rw") as inside:
            await inside.workers.update([Worker(worker_id="w", status="busy")])
            await inside.rollout_queue.enqueue(["ro-1"])
            await inside.span_sequence_ids.inc("k", 5)
            for collections in (writer, other):
                worker = await collections.workers.get()
                assert worker is not None
                assert worker.status == "unknown"
                assert list(await collections.rollout_queue.peek(5)) == []
                assert await collections.span_sequence_ids.get("k") is None
        worker = await other.workers.get()
    assert worker is not None
    assert worker.status == "busy"
    assert list(await other.rollout_queue.peek(5)) == ["ro-1"]


async def test_a_snapshot_stays_as_it_was(shared: Shared) -> None:
    reader, writer = shared.another(), shared.another()
    await writer.workers.insert([Worker(worker_id="w")])
    async with asyncio.timeout(PATIENCE), reader.atomic(mode="r", snapshot=True) as inside:
        before = (await inside.workers.query()).items
        await writer.workers.insert([Worker(worker_id="v")])
        await writer.rollout_queue.enqueue(["ro-1"])
        assert (await inside.workers.query()).items == before
        assert await inside.rollout_queue.size() == 0
    assert await reader.workers.size() == 2


async def test_one_reads_ones_own_writes(collections: SqlCollections) -> None:
    """Readers have connections of their own; each read begins after the write that came before it."""
    for number in range(50):
        await collections.workers.insert([Worker(worker_id=f"w{number}")])
        assert await collections.workers.size() == number + 1
        assert await collections.workers.get({"worker_id": {"exact": f"w{number}"}}) is not None


async def test_partitions_see_nothing_of_each_other(shared: Shared, database_of: Callable[[str], str]) -> None:
    mine = shared.another()
    await mine.workers.insert([Worker(worker_id="w")])
    await mine.rollout_queue.enqueue(["ro-1"])
    await mine.span_sequence_ids.set("k", 1)
    foreign = Shared(str(mine._database.url.render_as_string(hide_password=False)), "somebody else's")
    theirs = foreign.another()
    await theirs.workers.insert([Worker(worker_id="w", status="busy")])
    assert await theirs.workers.size() == 1
    assert list(await theirs.rollout_queue.dequeue(5)) == []
    assert await theirs.span_sequence_ids.inc("k", 10) == 10
    await theirs.workers.delete([Worker(worker_id="w")])
    await theirs.span_sequence_ids.pop("k")
    assert [worker.status for worker in (await mine.workers.query()).items] == ["unknown"]
    assert list(await mine.rollout_queue.peek(5)) == ["ro-1"]
    assert await mine.span_sequence_ids.get("k") == 1
    await foreign.close()
