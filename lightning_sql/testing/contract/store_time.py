"""What the passing of time does: attempts over their limits, waiting for rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    PATIENCE,
    Advance,
    StoreFixtures,
    attempt_of,
    attempted,
    drain,
    retrying,
    rollout_of,
    worker_of,
)
from lightning_sql.testing.samples import make_span

__all__ = ["CLAIM_TIMEOUT", "ClaimTimeoutContract", "WaitContract", "WatchdogContract"]

CLAIM_TIMEOUT = 0.5
"""Seconds after which the claims of the store under `ClaimTimeoutContract` end if nothing is heard."""

LIMIT = 0.25
"""Seconds that an attempt may take where it is meant to take longer."""

LONG = 3600.0
"""Seconds that no test takes."""

SCANNING: dict[str, Callable[[LightningStore, str], Awaitable[Any]]] = {
    "start_rollout": lambda store, _: store.start_rollout(1),
    "enqueue_rollout": lambda store, _: store.enqueue_rollout(1),
    "enqueue_many_rollouts": lambda store, _: store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)]),
    "dequeue_rollout": lambda store, _: store.dequeue_rollout(),
    "dequeue_many_rollouts": lambda store, _: store.dequeue_many_rollouts(limit=2),
    "start_attempt": lambda store, other: store.start_attempt(other),
    "query_rollouts": lambda store, _: store.query_rollouts(limit=1),
    "get_rollout_by_id": lambda store, other: store.get_rollout_by_id(other),
    "query_attempts": lambda store, other: store.query_attempts(other),
    "get_latest_attempt": lambda store, other: store.get_latest_attempt(other),
    "update_resources": lambda store, _: store.update_resources("r", {}),
    "wait_for_rollouts": lambda store, other: store.wait_for_rollouts(rollout_ids=[other], timeout=0),
    "query_spans": lambda store, other: store.query_spans(other),
    "update_rollout": lambda store, other: store.update_rollout(other, metadata={}),
    "update_attempt": lambda store, other: store.update_attempt(other, "latest", metadata={}),
    "query_workers": lambda store, _: store.query_workers(),
    "sweep": lambda store, _: store.sweep(),
}
"""The calls that look for overdue attempts first, each on a rollout that is none of them."""


class WatchdogContract(StoreFixtures):
    """Section 7.8 of the contract."""

    @pytest.mark.parametrize("call", SCANNING)
    async def test_calls_look_for_overdue_attempts_first(
        self, store: LightningStore, advance: Advance, call: str
    ) -> None:
        other = await store.start_rollout(1)
        await store.start_rollout(1, config=RolloutConfig(timeout_seconds=LIMIT), worker_id="w")
        assert (await worker_of(store, "w")).status == "busy"
        await advance(2 * LIMIT)
        await SCANNING[call](store, other.rollout_id)
        worker = await worker_of(store, "w")
        assert (worker.status, worker.current_rollout_id) == ("unknown", None)

    @pytest.mark.parametrize("verdict", ["timeout", "unresponsive"])
    async def test_an_overdue_attempt_is_ended(self, store: LightningStore, advance: Advance, verdict: str) -> None:
        limit: dict[str, Any] = {f"{verdict}_seconds": LIMIT}
        started = await store.start_rollout(1, config=RolloutConfig(**limit), worker_id="w")
        await advance(2 * LIMIT)
        rollout = attempted(await store.get_rollout_by_id(started.rollout_id))
        assert (rollout.status, rollout.attempt.status) == ("failed", verdict)
        assert rollout.end_time is not None
        assert rollout.attempt.end_time is None
        worker = await worker_of(store, "w")
        assert (worker.status, worker.last_idle_time) == ("unknown", rollout.end_time)
        assert await store.dequeue_rollout() is None

    async def test_within_its_limits_an_attempt_is_left(self, store: LightningStore, advance: Advance) -> None:
        config = RolloutConfig(timeout_seconds=LONG, unresponsive_seconds=LONG)
        for started in (await store.start_rollout(1, config=config), await store.start_rollout(2)):
            await advance(LIMIT)
            await store.sweep()
            assert (await attempt_of(store, started.rollout_id)).status == "preparing"

    @pytest.mark.parametrize("limit", [0.0, -1.0])
    async def test_a_limit_may_be_past_at_once(self, store: LightningStore, advance: Advance, limit: float) -> None:
        started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=limit))
        await advance(0.01)
        assert (await attempt_of(store, started.rollout_id)).status == "timeout"

    async def test_the_time_limit_comes_first(self, store: LightningStore, advance: Advance) -> None:
        config = RolloutConfig(timeout_seconds=LIMIT, unresponsive_seconds=LIMIT / 2)
        started = await store.start_rollout(1, config=config)
        await advance(2 * LIMIT)
        assert (await attempt_of(store, started.rollout_id)).status == "timeout"

    async def test_signs_of_life_count(self, store: LightningStore, advance: Advance) -> None:
        """The limit on silence counts from the last heartbeat; the one on the whole attempt does not."""
        silent = await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=LIMIT))
        late = await store.start_rollout(2, config=RolloutConfig(timeout_seconds=LIMIT, unresponsive_seconds=LONG))
        alive = await store.start_rollout(3, config=RolloutConfig(unresponsive_seconds=LONG))
        said = await store.start_rollout(4, config=RolloutConfig(unresponsive_seconds=LONG))
        await advance(2 * LIMIT)
        for rollout in (late, alive):
            await store.add_span(make_span(rollout.rollout_id, rollout.attempt.attempt_id, "s"))
        await store.update_attempt(said.rollout_id, "latest", last_heartbeat_time=1.0)
        await store.sweep()
        verdicts = [(await attempt_of(store, rollout.rollout_id)).status for rollout in (silent, late, alive, said)]
        assert verdicts == ["unresponsive", "timeout", "running", "unresponsive"]

    async def test_an_overdue_attempt_is_retried(self, store: LightningStore, advance: Advance) -> None:
        enqueued = await store.enqueue_rollout(1, config=retrying(2, timeout_seconds=LIMIT))
        other = await store.enqueue_rollout(2)
        first = attempted(await store.dequeue_rollout())
        await advance(2 * LIMIT)
        claimed = await drain(store)
        assert [(item.rollout_id, item.attempt.sequence_id) for item in claimed] == [
            (other.rollout_id, 1),
            (enqueued.rollout_id, 2),
        ]
        assert (await attempt_of(store, enqueued.rollout_id, 1)).attempt_id == first.attempt.attempt_id
        await advance(2 * LIMIT)
        assert (await rollout_of(store, enqueued.rollout_id)).status == "failed"
        assert await drain(store) == []

    async def test_only_active_rollouts_are_looked_at(self, store: LightningStore, advance: Advance) -> None:
        config = RolloutConfig(timeout_seconds=LIMIT)
        statuses: list[Any] = ["failed", "succeeded", "cancelled", "queuing", "requeuing"]
        rollouts = [await store.start_rollout(status, config=config) for status in statuses]
        queued = await store.enqueue_rollout("never claimed", config=config)
        for rollout, status in zip(rollouts, statuses, strict=True):
            await store.update_rollout(rollout.rollout_id, status=status)
        await advance(2 * LIMIT)
        await store.sweep()
        for rollout, status in zip(rollouts, statuses, strict=True):
            after = attempted(await store.get_rollout_by_id(rollout.rollout_id))
            assert (after.status, after.attempt.status) == (status, "preparing")
        assert (await rollout_of(store, queued.rollout_id)).status == "queuing"

    async def test_time_in_the_queue_does_not_count(self, store: LightningStore, advance: Advance) -> None:
        await store.enqueue_rollout(1, config=RolloutConfig(timeout_seconds=LIMIT * 4, unresponsive_seconds=LIMIT * 4))
        await advance(LIMIT * 5)
        claimed = attempted(await store.dequeue_rollout())
        assert (await attempt_of(store, claimed.rollout_id)).status == "preparing"

    async def test_only_the_latest_attempt_is_looked_at(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=LONG))
        await store.start_attempt(started.rollout_id)
        await store.update_attempt(started.rollout_id, started.attempt.attempt_id, last_heartbeat_time=1.0)
        await store.update_rollout(started.rollout_id, config=RolloutConfig(unresponsive_seconds=LONG))
        await store.sweep()
        assert (await attempt_of(store, started.rollout_id, 1)).status == "preparing"
        assert (await rollout_of(store, started.rollout_id)).status == "preparing"

    async def test_a_limit_set_later_counts(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1)
        await advance(2 * LIMIT)
        await store.update_rollout(started.rollout_id, config=RolloutConfig(timeout_seconds=LIMIT))
        assert (await attempt_of(store, started.rollout_id)).status == "timeout"

    async def test_an_attempt_that_shows_life_again_undoes_its_retry(
        self, store: LightningStore, advance: Advance
    ) -> None:
        started = await store.start_rollout(1, config=retrying(unresponsive_seconds=LIMIT))
        await advance(2 * LIMIT)
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        await store.update_rollout(started.rollout_id, config=retrying())
        await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "s"))
        rollout = attempted(await store.get_rollout_by_id(started.rollout_id))
        assert (rollout.status, rollout.attempt.status) == ("running", "running")
        assert await drain(store) == []

    async def test_a_retry_is_not_undone_by_a_dead_attempt(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1, config=retrying(timeout_seconds=LIMIT))
        await advance(2 * LIMIT)
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "late"))
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        [claimed] = await drain(store)
        assert claimed.attempt.sequence_id == 2

    async def test_concurrent_sweeps_end_an_attempt_once(self, store: LightningStore, advance: Advance) -> None:
        config = retrying(2, timeout_seconds=LIMIT)
        started = [await store.start_rollout(number, config=config) for number in range(5)]
        await advance(2 * LIMIT)
        await asyncio.gather(*(store.sweep() for _ in range(5)), *(store.query_workers() for _ in range(5)))
        claimed = await store.dequeue_many_rollouts(limit=50)
        assert sorted(item.rollout_id for item in claimed) == sorted(item.rollout_id for item in started)


class ClaimTimeoutContract(StoreFixtures):
    """For a store whose claims end after `CLAIM_TIMEOUT` seconds of silence, for clients that lose answers."""

    BEGUN: ClassVar[dict[str, Callable[[LightningStore, str], Awaitable[Any]]]] = {
        "dequeue": lambda store, _: store.dequeue_rollout("w"),
        "start": lambda store, _: store.start_rollout(1, worker_id="w"),
        "start_attempt": lambda store, other: store.start_attempt(other, "w"),
    }

    async def silent(self, store: LightningStore, advance: Advance, **config: Any) -> AttemptedRollout:
        """A rollout whose claim has ended, and that is queued again."""
        await store.enqueue_rollout("task", config=RolloutConfig(**config))
        claimed = attempted(await store.dequeue_rollout("w"))
        await advance(2 * CLAIM_TIMEOUT)
        await store.sweep()
        return claimed

    @pytest.mark.parametrize("begun", BEGUN)
    async def test_a_silent_claim_ends_and_is_queued_again(
        self, store: LightningStore, advance: Advance, begun: str
    ) -> None:
        other = await store.enqueue_rollout("other")
        if begun != "start_attempt":
            await store.update_rollout(other.rollout_id, status="cancelled")
        if begun == "dequeue":
            await store.enqueue_rollout("task")
        claimed = attempted(await self.BEGUN[begun](store, other.rollout_id))
        assert (await worker_of(store, "w")).status == "busy"
        await advance(2 * CLAIM_TIMEOUT)
        rollout = attempted(await store.get_rollout_by_id(claimed.rollout_id))
        assert (rollout.status, rollout.end_time) == ("requeuing", None)
        assert (rollout.attempt.status, rollout.attempt.end_time) == ("unresponsive", None)
        worker = await worker_of(store, "w")
        assert (worker.status, worker.current_attempt_id) == ("unknown", None)
        [again] = await drain(store)
        assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, 2)

    async def test_it_is_queued_again_as_often_as_it_takes(self, store: LightningStore, advance: Advance) -> None:
        config = RolloutConfig(max_attempts=1, retry_condition=["failed"])
        enqueued = await store.enqueue_rollout("task", config=config)
        for turn in range(1, 4):
            claimed = attempted(await store.dequeue_rollout())
            assert (claimed.rollout_id, claimed.attempt.sequence_id) == (enqueued.rollout_id, turn)
            await advance(2 * CLAIM_TIMEOUT)
        await store.update_rollout(enqueued.rollout_id, status="cancelled")
        await advance(2 * CLAIM_TIMEOUT)
        assert await drain(store) == []

    async def test_within_its_limit_a_claim_is_left(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1)
        await advance(CLAIM_TIMEOUT / 4)
        await store.sweep()
        assert (await attempt_of(store, started.rollout_id)).status == "preparing"

    @pytest.mark.parametrize("limits", [{}, {"timeout_seconds": LONG}])
    async def test_every_sign_of_life_ends_the_limit(
        self, store: LightningStore, advance: Advance, limits: Any
    ) -> None:
        config = RolloutConfig(**limits)
        started = [await store.start_rollout(number, config=config) for number in range(5)]
        keys = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in started]
        await store.add_span(make_span(*keys[0], "s"))
        changed = [
            await store.update_attempt(*keys[1], status="running"),
            await store.update_attempt(*keys[2], worker_id="w"),
            await store.update_attempt(keys[3][0], "latest", metadata={"pod": 1}),
            await store.update_attempt(*keys[4], last_heartbeat_time=1.0),
        ]
        assert None not in [attempt.last_heartbeat_time for attempt in changed]
        assert changed[3].last_heartbeat_time == 1.0
        await store.update_worker("w")
        await advance(4 * CLAIM_TIMEOUT)
        await store.sweep()
        after = [await attempt_of(store, rollout_id) for rollout_id, _ in keys]
        assert [attempt.status for attempt in after] == ["running", "running", "preparing", "preparing", "preparing"]
        assert [attempt.last_heartbeat_time for attempt in after[1:]] == [
            attempt.last_heartbeat_time for attempt in changed
        ]
        assert await drain(store) == []

    async def test_a_workers_heartbeat_says_nothing_of_its_attempt(
        self, store: LightningStore, advance: Advance
    ) -> None:
        started = await store.start_rollout(1, worker_id="w")
        await advance(2 * CLAIM_TIMEOUT)
        await store.update_worker("w")
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"

    async def test_a_late_caller_gets_on_with_what_nobody_else_took(
        self, store: LightningStore, advance: Advance
    ) -> None:
        for_spans = await self.silent(store, advance)
        await store.add_span(make_span(for_spans.rollout_id, for_spans.attempt.attempt_id, "s"))
        for_end = await self.silent(store, advance)
        await store.update_attempt(for_end.rollout_id, for_end.attempt.attempt_id, status="succeeded")
        assert await drain(store) == []
        revived = attempted(await store.get_rollout_by_id(for_spans.rollout_id))
        assert (revived.status, revived.attempt.status) == ("running", "running")
        assert (await rollout_of(store, for_end.rollout_id)).status == "succeeded"

    async def test_a_late_caller_does_not_fail_what_is_queued_again(
        self, store: LightningStore, advance: Advance
    ) -> None:
        """An update without a status makes nothing of an attempt that was given up, nor of its rollout."""
        claimed = await self.silent(store, advance)
        late = claimed.rollout_id, claimed.attempt.attempt_id
        await store.update_attempt(*late, metadata={"late": True})
        await store.update_attempt(*late, worker_id="v")
        rollout = attempted(await store.get_rollout_by_id(claimed.rollout_id))
        assert (rollout.status, rollout.attempt.status) == ("requeuing", "unresponsive")
        [again] = await drain(store)
        assert again.attempt.sequence_id == 2

    async def test_a_late_caller_does_not_move_what_another_took(self, store: LightningStore, advance: Advance) -> None:
        first = await self.silent(store, advance)
        second = attempted(await store.dequeue_rollout("v"))
        late = first.rollout_id, first.attempt.attempt_id
        assert await store.add_span(make_span(*late, "s")) is not None
        assert (await rollout_of(store, first.rollout_id)).status == "preparing"
        assert (await store.update_attempt(*late, status="failed")).end_time is not None
        rollout = attempted(await store.get_rollout_by_id(first.rollout_id))
        assert (rollout.status, rollout.attempt.attempt_id) == ("preparing", second.attempt.attempt_id)
        await store.update_attempt(rollout.rollout_id, second.attempt.attempt_id, status="succeeded")
        assert (await rollout_of(store, first.rollout_id)).status == "succeeded"

    async def test_an_outcome_is_left(self, store: LightningStore, advance: Advance) -> None:
        claimed = await self.silent(store, advance)
        await store.update_rollout(claimed.rollout_id, status="failed")
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, metadata={})
        assert (await rollout_of(store, claimed.rollout_id)).status == "failed"
        await store.update_rollout(claimed.rollout_id, status="succeeded")
        await store.sweep()
        assert (await rollout_of(store, claimed.rollout_id)).status == "succeeded"

    async def test_what_was_heard_of_goes_by_its_retry_settings(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=CLAIM_TIMEOUT))
        await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "s"))
        await advance(2 * CLAIM_TIMEOUT)
        rollout = attempted(await store.get_rollout_by_id(started.rollout_id))
        assert (rollout.status, rollout.attempt.status) == ("failed", "unresponsive")

    async def test_it_comes_before_the_limits_of_the_rollout(self, store: LightningStore, advance: Advance) -> None:
        """Who never got a claim did not work on it for too long."""
        claimed = await self.silent(store, advance, timeout_seconds=LIMIT, unresponsive_seconds=LIMIT)
        rollout = attempted(await store.get_rollout_by_id(claimed.rollout_id))
        assert (rollout.status, rollout.attempt.status) == ("requeuing", "unresponsive")

    async def test_a_shorter_limit_on_silence_queues_again_too(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=CLAIM_TIMEOUT / 8))
        await advance(CLAIM_TIMEOUT / 4)
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"

    async def test_a_status_set_by_hand_is_looked_at(self, store: LightningStore, advance: Advance) -> None:
        claimed = await self.silent(store, advance)
        started = await store.start_rollout(1)
        await store.update_rollout(started.rollout_id, status="cancelled")
        await advance(2 * CLAIM_TIMEOUT)
        await store.update_rollout(claimed.rollout_id, status="running")
        await store.update_rollout(started.rollout_id, status="preparing")
        await advance(CLAIM_TIMEOUT)
        await store.sweep()
        # The attempt of the first was given up already, and no limit is on that.
        assert (await rollout_of(store, claimed.rollout_id)).status == "running"
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"


class WaitContract(StoreFixtures):
    """Section 7.7 of the contract."""

    FINISHED: ClassVar[list[Any]] = ["succeeded", "failed", "cancelled"]

    async def test_finished_ones_are_given_at_once(self, store: LightningStore) -> None:
        rollouts = [await store.enqueue_rollout(status) for status in self.FINISHED]
        for rollout in rollouts:
            await store.update_rollout(rollout.rollout_id, status=rollout.input)
        ids = [rollout.rollout_id for rollout in rollouts]
        asked = [ids[2], "ro-000000000000", ids[0], ids[1], ids[0]]
        async with asyncio.timeout(PATIENCE):
            for timeout in (0, -1, LONG, None):
                found = await store.wait_for_rollouts(rollout_ids=asked, timeout=timeout)
                assert [rollout.input for rollout in found] == ["cancelled", "succeeded", "failed", "succeeded"]

    async def test_unknown_ones_are_not_waited_for(self, store: LightningStore) -> None:
        async with asyncio.timeout(PATIENCE):
            assert await store.wait_for_rollouts(rollout_ids=["ro-000000000000"], timeout=None) == []
            assert await store.wait_for_rollouts(rollout_ids=[], timeout=None) == []

    async def test_the_deadline_gives_those_that_are_finished(self, store: LightningStore) -> None:
        done, open_ = await store.start_rollout(1), await store.start_rollout(2)
        await store.update_attempt(done.rollout_id, "latest", status="succeeded")
        ids = [open_.rollout_id, done.rollout_id]
        async with asyncio.timeout(PATIENCE):
            for timeout in (0, -5, 0.05):
                found = await store.wait_for_rollouts(rollout_ids=ids, timeout=timeout)
                assert [rollout.rollout_id for rollout in found] == [done.rollout_id]

    async def test_the_last_one_to_finish_ends_the_wait(self, store: LightningStore) -> None:
        rollouts = [await store.start_rollout(number) for number in range(3)]
        ids = [rollout.rollout_id for rollout in rollouts]
        for timeout in (None, LONG):
            waits = [
                asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=timeout)),
                asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids[:1], timeout=timeout)),
            ]
            await asyncio.sleep(0.05)
            await store.update_attempt(ids[0], "latest", status="succeeded")
            async with asyncio.timeout(PATIENCE):
                assert [rollout.input for rollout in await waits[1]] == [0]
            assert not waits[0].done()
            await store.update_rollout(ids[1], status="cancelled")
            await store.update_attempt(ids[2], "latest", status="failed")
            async with asyncio.timeout(PATIENCE):
                found = await waits[0]
            assert [rollout.status for rollout in found] == ["succeeded", "cancelled", "failed"]
            assert all(rollout.end_time is not None for rollout in found)
            for rollout_id in ids:
                await store.update_rollout(rollout_id, status="running")

    async def test_the_watchdog_ends_a_wait(self, store: LightningStore, advance: Advance) -> None:
        started = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=LIMIT))
        wait = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=None))
        await asyncio.sleep(0.02)
        await advance(2 * LIMIT)
        async with asyncio.timeout(PATIENCE):
            assert [rollout.status for rollout in await wait] == ["failed"]

    async def test_many_waits_keep_nobody_from_working(self, store: LightningStore) -> None:
        rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(8)])
        waits = [
            asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollouts[number % 8].rollout_id], timeout=LONG))
            for number in range(80)
        ]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE):
            for claimed in await drain(store):
                await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
            results = await asyncio.gather(*waits)
        assert [found[0].input for found in results] == [number % 8 for number in range(80)]

    async def test_a_wait_can_be_given_up(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        wait = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=None))
        await asyncio.sleep(0.02)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        await store.update_attempt(started.rollout_id, "latest", status="succeeded")
        async with asyncio.timeout(PATIENCE):
            assert len(await store.wait_for_rollouts(rollout_ids=[started.rollout_id])) == 1
