"""What a store on a shared database owes to its neighbours, and what only an injected clock can show."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lightning_sql.errors import InvalidRequestError
from lightning_sql.records import RolloutConfig
from lightning_sql.store import collection_writes, sql_store
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.backends import COLLECTIONS, POSTGRES, SQLITE, START, Clock, NewStore

PATIENCE = 30.0

OpenStore = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite", POSTGRES, *COLLECTIONS])
async def store(request: pytest.FixtureRequest, new_store: NewStore) -> AsyncIterator[LightningStore]:
    async with new_store(request.param) as store:
        yield store


@pytest.fixture(params=["sqlite", POSTGRES])
async def open_another(request: pytest.FixtureRequest, database_of: Callable[[str], str]) -> AsyncIterator[OpenStore]:
    """Opens stores on one database, as several processes would, by default on one partition."""
    opened: list[LightningStore] = []

    async def another(partition: str = request.node.name, **options: Any) -> LightningStore:
        store = await open_store(database_of(request.param), partition=partition, **options)
        opened.append(store)
        return store

    yield another
    for store in opened:
        await store.close()


async def test_sweep_says_how_many_attempts_it_ended(store: LightningStore, clock: Clock) -> None:
    for seconds in (1.0, 1.0, 60.0, None):
        await store.start_rollout(1, config=RolloutConfig(timeout_seconds=seconds))
    clock.now += 2.0
    assert [await store.sweep(), await store.sweep()] == [2, 0]


async def test_limits_are_strict(store: LightningStore, clock: Clock) -> None:
    timed = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=8.0))
    silent = await store.start_rollout(2, config=RolloutConfig(unresponsive_seconds=8.0))

    async def statuses() -> list[str]:
        found = [await store.get_latest_attempt(rollout.rollout_id) for rollout in (timed, silent)]
        return [attempt.status for attempt in found if attempt is not None]

    clock.now += 8.0
    assert await statuses() == ["preparing", "preparing"]
    clock.now += 0.25
    assert await statuses() == ["timeout", "unresponsive"]


async def test_a_clock_that_steps_back_does_not_hide_the_latest_resources(store: LightningStore, clock: Clock) -> None:
    first = await store.add_resources({})
    clock.now -= 3600.0
    second = await store.add_resources({})
    third = await store.update_resources(first.resources_id, {})
    latest = await store.get_latest_resources()
    assert latest == third
    assert first.update_time < second.update_time < third.update_time
    assert (await store.enqueue_rollout(1)).resources_id == first.resources_id


async def test_records_go_by_the_injected_clock(store: LightningStore, clock: Clock) -> None:
    started = await store.start_rollout(1, worker_id="w")
    clock.now += 5.0
    await store.update_attempt(started.rollout_id, "latest", status="succeeded")
    rollout = await store.get_rollout_by_id(started.rollout_id)
    worker = await store.get_worker_by_id("w")
    assert rollout is not None
    assert worker is not None
    assert (rollout.start_time, rollout.end_time) == (START, START + 5.0)
    assert (worker.last_busy_time, worker.last_idle_time) == (START, START + 5.0)


async def test_another_process_wakes_a_waiter(open_another: OpenStore) -> None:
    one, other = await open_another(), await open_another()
    started = await one.start_rollout(1)
    waiting = asyncio.create_task(one.wait_for_rollouts(rollout_ids=[started.rollout_id]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await other.update_attempt(started.rollout_id, "latest", status="succeeded")
    async with asyncio.timeout(PATIENCE):
        [finished] = await waiting
    assert finished.status == "succeeded"


@pytest.mark.parametrize("outcome", ["attempt", "rollout", "watchdog"])
@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])
async def test_what_finishes_here_wakes_a_waiter_without_a_poll(
    new_store: NewStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, outcome: str
) -> None:
    for module in (collection_writes, sql_store):
        monkeypatch.setattr(module, "POLL_SECONDS", 3600.0)
    async with new_store(kind) as store:
        started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1.0))
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[started.rollout_id]))
        await asyncio.sleep(0.01)
        if outcome == "attempt":
            await store.update_attempt(started.rollout_id, "latest", status="succeeded")
        elif outcome == "rollout":
            await store.update_rollout(started.rollout_id, status="cancelled")
        else:
            clock.now += 2.0
            await store.query_workers()
        async with asyncio.timeout(PATIENCE):
            assert len(await waiting) == 1


async def test_closing_lets_waiters_go(open_another: OpenStore) -> None:
    store = await open_another()
    done, pending = await store.start_rollout(1), await store.start_rollout(2)
    await store.update_rollout(done.rollout_id, status="succeeded")
    ids = [done.rollout_id, pending.rollout_id]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids))
    await asyncio.sleep(0.05)
    await store.release_waiters()
    async with asyncio.timeout(PATIENCE):
        assert [rollout.input for rollout in await waiting] == [1]


async def test_what_was_stored_is_there_for_the_next_process(open_another: OpenStore) -> None:
    first = await open_another()
    await first.enqueue_rollout("queued", metadata={"k": [1]})
    started = await first.start_rollout("started", worker_id="w")
    await first.get_next_span_sequence_id(started.rollout_id, "any")
    await first.add_resources({})
    before = [(await call()).items for call in (first.query_rollouts, first.query_workers, first.query_resources)]
    await first.close()
    second = await open_another()
    after = [(await call()).items for call in (second.query_rollouts, second.query_workers, second.query_resources)]
    assert after == before
    assert await second.get_next_span_sequence_id(started.rollout_id, "any") == 2
    claimed = await second.dequeue_rollout()
    assert claimed.input == "queued"


async def test_stores_of_different_partitions_see_nothing_of_each_other(open_another: OpenStore) -> None:
    mine, theirs = await open_another("mine"), await open_another("theirs")
    rollout = await mine.enqueue_rollout(1)
    await mine.update_resources("r", {})
    await mine.update_worker("w", {"x": 1})
    await mine.get_next_span_sequence_id("shared name", "any")
    assert await theirs.dequeue_rollout() is None
    assert await theirs.get_rollout_by_id(rollout.rollout_id) is None
    assert await theirs.get_latest_resources() is None
    assert await theirs.get_worker_by_id("w") is None
    assert await theirs.get_next_span_sequence_id("shared name", "any") == 1
    assert (await theirs.update_worker("w")).heartbeat_stats is None
    statistics = await theirs.statistics()
    assert (statistics["total_rollouts"], statistics["total_resources"], statistics["total_workers"]) == (0, 0, 1)
    assert (await mine.update_worker("w")).heartbeat_stats == {"x": 1}
    assert (await mine.dequeue_rollout()).input == 1


async def test_an_id_that_no_record_can_have_is_refused_for_new_ones(store: LightningStore) -> None:
    for wrong in ("a\x00b", "\ud800", "x" * 513, "é" * 257):
        for call in (
            store.update_worker(wrong),
            store.update_resources(wrong, {}),
            store.start_rollout(1, worker_id=wrong),
        ):
            with pytest.raises((InvalidRequestError, ValueError)):
                await call
        assert await store.get_worker_by_id(wrong) is None
        assert await store.get_resources_by_id(wrong) is None
    longest = "é" * 256
    await store.update_worker(longest)
    assert (await store.get_worker_by_id(longest)) is not None
