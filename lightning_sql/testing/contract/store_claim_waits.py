"""Claims that wait for something in the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from lightning_sql.records import EnqueueRolloutRequest, IdempotencyKey, RolloutConfig
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    PATIENCE,
    Advance,
    StoreFixtures,
    attempted,
    drain,
    inputs,
    retrying,
)

__all__ = ["ClaimWaitContract"]

SHORT = 0.05
LIMIT = 0.25
SETTLE = 0.3
"""Seconds after which calls that were made have come to wait."""


async def _requeued(store: LightningStore, rollout_id: str) -> None:
    await store.update_rollout(rollout_id, status="requeuing")


async def _failed(store: LightningStore, rollout_id: str) -> None:
    await store.update_attempt(rollout_id, "latest", status="failed")


class ClaimWaitContract(StoreFixtures):
    """`wait` of `dequeue_rollout` and `dequeue_many_rollouts`."""

    async def test_what_is_queued_is_claimed_at_once(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
        async with asyncio.timeout(PATIENCE):
            assert attempted(await store.dequeue_rollout("w", wait=2 * PATIENCE)).input == 0
            claimed = await store.dequeue_many_rollouts(limit=5, worker_id="w", wait=2 * PATIENCE)
        assert inputs(claimed) == [1, 2]

    async def test_an_empty_queue_is_waited_for_so_long(self, store: LightningStore) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        async with asyncio.timeout(PATIENCE):
            assert await store.dequeue_rollout("w", wait=SHORT) is None
            assert clock() - begun >= SHORT
            assert list(await store.dequeue_many_rollouts(limit=3, wait=SHORT)) == []
            assert await store.dequeue_rollout(wait=0.0) is None
            assert await store.dequeue_rollout(wait=-1.0) is None
            assert list(await store.dequeue_many_rollouts(limit=0, wait=2 * PATIENCE)) == []

    async def test_what_is_enqueued_goes_to_one_who_waits(self, store: LightningStore) -> None:
        waiting = asyncio.create_task(store.dequeue_rollout("w", wait=PATIENCE))
        await asyncio.sleep(SETTLE)
        rollout = await store.enqueue_rollout("x")
        async with asyncio.timeout(PATIENCE):
            claimed = attempted(await waiting)
        assert (claimed.rollout_id, claimed.status) == (rollout.rollout_id, "preparing")
        assert (claimed.attempt.worker_id, claimed.attempt.sequence_id) == ("w", 1)

    @pytest.mark.parametrize("requeue", [_requeued, _failed])
    async def test_so_does_what_is_queued_again(
        self, store: LightningStore, requeue: Callable[[LightningStore, str], Awaitable[None]]
    ) -> None:
        first = await store.start_rollout("x", config=retrying())
        waiting = asyncio.create_task(store.dequeue_rollout("w", wait=PATIENCE))
        await asyncio.sleep(SETTLE)
        await requeue(store, first.rollout_id)
        async with asyncio.timeout(PATIENCE):
            claimed = attempted(await waiting)
        assert (claimed.rollout_id, claimed.attempt.sequence_id) == (first.rollout_id, 2)

    async def test_so_does_what_the_watchdog_queues(self, store: LightningStore, advance: Advance) -> None:
        config = RolloutConfig(timeout_seconds=LIMIT, max_attempts=2, retry_condition=["timeout"])
        first = await store.start_rollout("x", config=config)
        waiting = asyncio.create_task(store.dequeue_rollout("w", wait=PATIENCE))
        await asyncio.sleep(0)
        await advance(2 * LIMIT)
        async with asyncio.timeout(PATIENCE):
            claimed = attempted(await waiting)
        assert (claimed.rollout_id, claimed.attempt.sequence_id) == (first.rollout_id, 2)

    async def test_each_of_many_gets_one(self, store: LightningStore) -> None:
        count = 60
        waiting = [asyncio.create_task(store.dequeue_rollout(f"w{n}", wait=PATIENCE)) for n in range(count)]
        await asyncio.sleep(SETTLE)
        created = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(count // 2)])
        more = await asyncio.gather(*(store.enqueue_rollout(n) for n in range(count // 2, count)))
        async with asyncio.timeout(PATIENCE):
            claimed = [attempted(rollout) for rollout in await asyncio.gather(*waiting)]
        expected = Counter(rollout.rollout_id for rollout in (*created, *more))
        assert Counter(rollout.rollout_id for rollout in claimed) == expected
        assert await drain(store) == []

    async def test_who_has_gone_gets_nothing(self, store: LightningStore) -> None:
        gone = [asyncio.create_task(store.dequeue_rollout(f"gone{n}", wait=PATIENCE)) for n in range(5)]
        stays = asyncio.create_task(store.dequeue_rollout("stays", wait=PATIENCE))
        await asyncio.sleep(SETTLE)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        await asyncio.sleep(SETTLE)
        rollout = await store.enqueue_rollout("x")
        async with asyncio.timeout(PATIENCE):
            claimed = attempted(await stays)
        assert (claimed.rollout_id, claimed.attempt.worker_id) == (rollout.rollout_id, "stays")

    async def test_a_repeated_claim_is_answered_at_once(self, store: LightningStore) -> None:
        key = IdempotencyKey("key", "dequeue", "body")
        waiting = asyncio.create_task(store.dequeue_rollout("w", wait=PATIENCE, idempotency_key=key))
        await asyncio.sleep(SETTLE)
        await store.enqueue_rollout("x")
        async with asyncio.timeout(PATIENCE):
            first = attempted(await waiting)
            again = attempted(await store.dequeue_rollout("w", wait=2 * PATIENCE, idempotency_key=key))
        assert again.attempt.attempt_id == first.attempt.attempt_id
