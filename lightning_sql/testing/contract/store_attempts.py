"""How attempts end, and what follows for their rollout and worker."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
from lightning_sql.records import ROLLOUT_FINISHED, ROLLOUT_QUEUED, Rollout, RolloutConfig
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    Advance,
    StoreFixtures,
    attempt_of,
    attempted,
    contents,
    drain,
    retrying,
    rollout_of,
)
from lightning_sql.testing.samples import assert_same, make_span

__all__ = ["AttemptContract"]

STATUSES: list[Any] = ["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
ENDED = {"failed", "succeeded"}
LOST: list[Any] = ["failed", "timeout", "unresponsive"]


class AttemptContract(StoreFixtures):
    """Section 7.5 of the contract, and law 6."""

    async def test_queries_sort_and_page(self, store: LightningStore, advance: Advance) -> None:
        rollout = await store.start_rollout(1)
        other = await store.start_rollout(2)
        for _ in range(4):
            await advance(0.002)
            await store.start_attempt(rollout.rollout_id)
        third = await attempt_of(store, rollout.rollout_id, 3)
        await store.update_attempt(rollout.rollout_id, third.attempt_id, "failed")

        async def numbers(**options: Any) -> list[int]:
            page = await store.query_attempts(rollout.rollout_id, **options)
            assert page.total == 5
            return [attempt.sequence_id for attempt in page]

        assert await numbers() == [1, 2, 3, 4, 5]
        assert await numbers(sort_order="desc") == [5, 4, 3, 2, 1]
        assert await numbers(sort_by=None) == [1, 2, 3, 4, 5]
        assert await numbers(sort_by="start_time", sort_order="desc") == [5, 4, 3, 2, 1]
        assert await numbers(sort_by="end_time") == [3, 1, 2, 4, 5]
        assert await numbers(sort_by="status") == [3, 1, 2, 4, 5]
        assert await numbers(limit=2, offset=1) == [2, 3]
        assert await numbers(limit=2, offset=9) == []
        assert [attempt.attempt_id for attempt in await store.query_attempts(other.rollout_id)] == [
            other.attempt.attempt_id
        ]
        assert (await attempt_of(store, rollout.rollout_id)).sequence_id == 5

    async def test_an_update_sets_what_is_given(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        key = (started.rollout_id, started.attempt.attempt_id)
        expected = started.attempt
        changes: dict[str, Any] = {"metadata": {"b": 1, "a": [None]}, "last_heartbeat_time": -5.5, "worker_id": "w"}
        for name, value in changes.items():
            expected = expected.model_copy(update={name: value})
            assert_same(await store.update_attempt(*key, **{name: value}), expected)
            assert_same(await store.get_latest_attempt(started.rollout_id), expected)
        assert_same(await store.update_attempt(*key), expected)
        empty: dict[str, Any] = {"metadata": {}, "worker_id": ""}
        for name, value in empty.items():
            expected = expected.model_copy(update={name: value})
            assert_same(await store.update_attempt(*key, **{name: value}), expected)
        both = await store.update_attempt(*key, status="running", metadata={"c": 1})
        assert_same(both, expected.model_copy(update={"status": "running", "metadata": {"c": 1}}))

    @pytest.mark.parametrize("field", ["status", "worker_id", "last_heartbeat_time", "metadata"])
    async def test_nothing_can_be_set_to_null(self, store: LightningStore, field: str) -> None:
        started = await store.start_rollout(1, worker_id="w")
        changes: dict[str, Any] = {field: None}
        with pytest.raises(InvalidRequestError):
            await store.update_attempt(started.rollout_id, started.attempt.attempt_id, **changes)
        assert_same(await store.get_rollout_by_id(started.rollout_id), started)

    async def test_latest_names_the_highest_number(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        begun = await store.start_attempt(started.rollout_id)
        updated = await store.update_attempt(started.rollout_id, "latest", metadata={"x": 1})
        assert updated.attempt_id == begun.attempt.attempt_id
        assert (await attempt_of(store, started.rollout_id, 1)).metadata is None

    async def test_unknown_attempts(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        other = await store.start_rollout(2)
        queued = await store.enqueue_rollout(3)
        before = await contents(store, started.rollout_id, other.rollout_id)
        for key in (
            (started.rollout_id, "at-00000000"),
            (started.rollout_id, other.attempt.attempt_id),
            (started.rollout_id, "\x00"),
            ("ro-000000000000", started.attempt.attempt_id),
            (queued.rollout_id, "latest"),
        ):
            with pytest.raises(RecordNotFoundError):
                await store.update_attempt(*key, status="failed", worker_id="w")
        assert await contents(store, started.rollout_id, other.rollout_id) == before

    @pytest.mark.parametrize("before", STATUSES)
    @pytest.mark.parametrize("after", STATUSES)
    async def test_end_times(self, store: LightningStore, advance: Advance, before: Any, after: Any) -> None:
        started = await store.start_rollout(1, config=retrying(9))
        first = await store.update_attempt(started.rollout_id, "latest", status=before)
        await advance(0.005)
        second = await store.update_attempt(started.rollout_id, "latest", status=after)
        assert (first.end_time is not None) is (before in ENDED)
        if after in ENDED:
            assert second.end_time is not None
            assert second.end_time > (first.end_time or started.start_time)
        else:
            assert second.end_time == first.end_time

    @pytest.mark.parametrize(
        ("status", "config", "expected"),
        [
            ("preparing", RolloutConfig(), "preparing"),
            ("running", RolloutConfig(), "running"),
            ("succeeded", retrying(), "succeeded"),
            *[(status, RolloutConfig(), "failed") for status in LOST],
            *[(status, RolloutConfig(max_attempts=5), "failed") for status in LOST],
            *[(status, RolloutConfig(retry_condition=[status]), "failed") for status in LOST],
            *[(status, RolloutConfig(max_attempts=2, retry_condition=[status]), "requeuing") for status in LOST],
            ("failed", RolloutConfig(max_attempts=2, retry_condition=["timeout", "unresponsive"]), "failed"),
            ("timeout", RolloutConfig(max_attempts=2, retry_condition=["failed"]), "failed"),
            ("succeeded", RolloutConfig(max_attempts=2, retry_condition=["succeeded"]), "succeeded"),
            ("running", RolloutConfig(max_attempts=2, retry_condition=["running"]), "running"),
        ],
    )
    async def test_the_rollout_follows_its_latest_attempt(
        self, store: LightningStore, status: Any, config: RolloutConfig, expected: str
    ) -> None:
        started = await store.start_rollout(1, config=config)
        attempt = await store.update_attempt(started.rollout_id, started.attempt.attempt_id, status=status)
        rollout = attempted(await store.get_rollout_by_id(started.rollout_id))
        assert rollout.status == expected
        assert (rollout.end_time is not None) is (expected in ROLLOUT_FINISHED)
        assert_same(rollout.attempt, attempt)
        assert [claimed.rollout_id for claimed in await drain(store)] == [started.rollout_id] * (
            expected in ROLLOUT_QUEUED
        )

    async def test_retries_end_with_max_attempts(self, store: LightningStore) -> None:
        await store.enqueue_rollout(1, config=retrying(3))
        for sequence_id, expected in ((1, "requeuing"), (2, "requeuing"), (3, "failed")):
            claimed = attempted(await store.dequeue_rollout())
            assert claimed.attempt.sequence_id == sequence_id
            await store.update_attempt(claimed.rollout_id, "latest", status="failed")
            assert (await rollout_of(store, claimed.rollout_id)).status == expected
        assert await store.dequeue_rollout() is None
        begun = await store.start_attempt(claimed.rollout_id)
        assert (begun.attempt.sequence_id, begun.status, begun.end_time) == (4, "preparing", None)
        await store.update_attempt(claimed.rollout_id, "latest", status="failed")
        assert (await rollout_of(store, claimed.rollout_id)).status == "failed"

    async def test_a_retry_goes_to_the_tail(self, store: LightningStore) -> None:
        first = await store.enqueue_rollout(1, config=retrying())
        second = await store.enqueue_rollout(2)
        await store.dequeue_rollout()
        await store.update_attempt(first.rollout_id, "latest", status="timeout")
        third = await store.enqueue_rollout(3)
        claimed = [rollout.rollout_id for rollout in await drain(store)]
        assert claimed == [second.rollout_id, first.rollout_id, third.rollout_id]

    @pytest.mark.parametrize("changes", [{"status": "failed"}, {"status": "succeeded"}, {"metadata": {"x": 1}}])
    async def test_an_older_attempt_never_moves_the_rollout(
        self, store: LightningStore, changes: dict[str, Any]
    ) -> None:
        started = await store.start_rollout(1, config=retrying())
        begun = await store.start_attempt(started.rollout_id)
        old = await store.update_attempt(started.rollout_id, started.attempt.attempt_id, **changes)
        assert {name: getattr(old, name) for name in changes} == changes
        assert_same(await store.get_rollout_by_id(started.rollout_id), begun)
        await store.update_attempt(started.rollout_id, "latest", status="succeeded")
        finished = await rollout_of(store, started.rollout_id)
        await store.update_attempt(started.rollout_id, started.attempt.attempt_id, status="running")
        assert_same(await store.get_rollout_by_id(started.rollout_id), finished)

    @pytest.mark.parametrize("explicit", ["succeeded", "failed", "queuing", "requeuing"])
    async def test_any_update_of_the_latest_attempt_decides_again(self, store: LightningStore, explicit: Any) -> None:
        started = await store.start_rollout(1)
        await store.update_attempt(started.rollout_id, "latest", status="running")
        await store.update_rollout(started.rollout_id, status=explicit)
        await store.update_attempt(started.rollout_id, "latest", metadata={"x": 1})
        rollout = await rollout_of(store, started.rollout_id)
        assert (rollout.status, rollout.end_time) == ("running", None)
        assert await drain(store) == []

    async def test_an_attempt_that_is_alive_again_revives_its_rollout(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        failed = await store.update_attempt(started.rollout_id, "latest", status="failed")
        assert (await rollout_of(store, started.rollout_id)).end_time is not None
        revived = await store.update_attempt(started.rollout_id, "latest", status="running")
        assert (revived.status, revived.end_time) == ("running", failed.end_time)
        rollout = await rollout_of(store, started.rollout_id)
        assert (rollout.status, rollout.end_time) == ("running", None)

    async def test_a_retry_is_undone_when_its_attempt_succeeds_after_all(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, config=retrying())
        await store.update_attempt(started.rollout_id, "latest", status="unresponsive")
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        await store.update_attempt(started.rollout_id, "latest", status="succeeded")
        assert (await rollout_of(store, started.rollout_id)).status == "succeeded"
        assert await drain(store) == []

    @pytest.mark.parametrize("status", STATUSES)
    async def test_cancelled_is_sticky(self, store: LightningStore, status: Any) -> None:
        started = await store.start_rollout(1, config=retrying(), worker_id="w")
        cancelled = await store.update_rollout(started.rollout_id, status="cancelled")

        async def unmoved() -> None:
            now = await rollout_of(store, started.rollout_id)
            assert_same(Rollout(**{name: getattr(now, name) for name in Rollout.model_fields}), cancelled)

        await store.update_attempt(started.rollout_id, "latest", metadata={"x": 1})
        await unmoved()
        await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "s"))
        await unmoved()
        ended = await store.update_attempt(started.rollout_id, "latest", status=status)
        assert (ended.status, ended.end_time is not None) == (status, status in ENDED)
        await unmoved()
        assert await drain(store) == []
        await store.update_rollout(started.rollout_id, metadata={"y": 1})
        assert (await rollout_of(store, started.rollout_id)).status == "cancelled"

    async def test_cancelled_is_left_by_a_status_or_a_new_attempt(self, store: LightningStore) -> None:
        for explicit in (False, True):
            started = await store.start_rollout(1)
            await store.update_rollout(started.rollout_id, status="cancelled")
            if explicit:
                await store.update_rollout(started.rollout_id, status="running")
            else:
                await store.start_attempt(started.rollout_id)
            left = await rollout_of(store, started.rollout_id)
            assert (left.status, left.end_time) == ("running" if explicit else "preparing", None)
            await store.update_attempt(started.rollout_id, "latest", status="succeeded")
            assert (await rollout_of(store, started.rollout_id)).status == "succeeded"

    async def test_a_change_of_config_counts_from_the_next_update_on(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        await store.update_attempt(started.rollout_id, "latest", status="failed")
        await store.update_rollout(started.rollout_id, config=retrying())
        assert (await rollout_of(store, started.rollout_id)).status == "failed"
        await store.update_attempt(started.rollout_id, "latest", metadata={"again": True})
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        assert [claimed.attempt.sequence_id for claimed in await drain(store)] == [2]
