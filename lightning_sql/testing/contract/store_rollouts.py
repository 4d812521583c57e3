"""How rollouts are created, claimed, updated and found."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
from lightning_sql.records import (
    ROLLOUT_FINISHED,
    ROLLOUT_QUEUED,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PromptTemplate,
    Rollout,
    RolloutConfig,
)
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    Advance,
    StoreFixtures,
    attempt_of,
    attempted,
    contents,
    drain,
    inputs,
    rollout_of,
)
from lightning_sql.testing.samples import assert_same

__all__ = ["RolloutContract"]

STATUSES: list[Any] = ["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]


class RolloutContract(StoreFixtures):
    """Sections 7.1 to 7.4 and 5 of the contract."""

    async def test_an_enqueued_rollout(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout({"task": 1})
        assert re.fullmatch(r"ro-[0-9a-f]{12}", rollout.rollout_id)
        expected = Rollout(rollout_id=rollout.rollout_id, input={"task": 1}, start_time=rollout.start_time, metadata={})
        assert_same(rollout, expected)
        assert rollout.config == RolloutConfig()
        assert_same(await store.get_rollout_by_id(rollout.rollout_id), expected)
        assert_same((await store.query_rollouts()).items, [expected])
        assert await store.get_latest_attempt(rollout.rollout_id) is None

    async def test_what_is_said_of_a_rollout_is_kept(self, store: LightningStore) -> None:
        config = RolloutConfig(
            timeout_seconds=-1.5, unresponsive_seconds=2, max_attempts=7, retry_condition=["failed", "failed"]
        )
        kept: Any = {"mode": "val", "resources_id": "never heard of", "config": config, "metadata": {"b": 1, "a": []}}
        rollout = await store.enqueue_rollout(None, **kept)
        again = await rollout_of(store, rollout.rollout_id)
        expected = {"input": None, **kept}
        assert {name: getattr(rollout, name) for name in expected} == expected
        assert {name: getattr(again, name) for name in expected} == expected
        started = await store.start_rollout(5, **(kept | {"config": RolloutConfig(max_attempts=2)}))
        assert (started.mode, started.resources_id, started.metadata) == ("val", "never heard of", kept["metadata"])

    async def test_no_time_has_a_sign_of_zero(self, store: LightningStore) -> None:
        config = RolloutConfig(timeout_seconds=-0.0, unresponsive_seconds=-0.0)
        enqueued = await store.enqueue_rollout(1, config=config)
        for rollout in (enqueued, await rollout_of(store, enqueued.rollout_id)):
            assert_same([rollout.config.timeout_seconds, rollout.config.unresponsive_seconds], [0.0, 0.0])
        started = await store.start_rollout(2)
        update: Any = {"status": "running", "last_heartbeat_time": -0.0}
        changed = await store.update_attempt(started.rollout_id, started.attempt.attempt_id, **update)
        assert_same(changed.last_heartbeat_time, 0.0)
        assert_same((await store.query_attempts(started.rollout_id)).items[0].last_heartbeat_time, 0.0)

    async def test_config_and_metadata_are_copied(self, store: LightningStore) -> None:
        config, metadata, input_ = RolloutConfig(), {"list": [1]}, {"list": [1]}
        enqueued = await store.enqueue_rollout(input_, config=config, metadata=metadata)
        started = await store.start_rollout(input_, config=config, metadata=metadata)
        config.max_attempts = 9
        metadata["list"].append(2)
        input_["list"].append(2)
        enqueued.config.max_attempts = started.config.max_attempts = 8
        for rollout_id in (enqueued.rollout_id, started.rollout_id):
            stored = await rollout_of(store, rollout_id)
            assert (stored.input, stored.config.max_attempts, stored.metadata) == ({"list": [1]}, 1, {"list": [1]})

    async def test_enqueue_many_keeps_the_order(self, store: LightningStore) -> None:
        assert list(await store.enqueue_many_rollouts([])) == []
        requests = [EnqueueRolloutRequest(input=number, mode="train") for number in range(20)]
        rollouts = await store.enqueue_many_rollouts(requests)
        assert inputs(rollouts) == list(range(20))
        assert len({rollout.rollout_id for rollout in rollouts}) == 20
        assert inputs(await store.query_rollouts()) == list(range(20))
        await store.enqueue_rollout("last")
        assert inputs(await drain(store)) == [*range(20), "last"]

    async def test_the_latest_resources_are_the_default(self, store: LightningStore) -> None:
        assert (await store.enqueue_rollout(0)).resources_id is None
        template = PromptTemplate(template="", engine="jinja")
        first = await store.add_resources({"prompt": template})
        assert (await store.enqueue_rollout(0)).resources_id == first.resources_id
        second = await store.add_resources({"prompt": template})
        assert (await store.start_rollout(0)).resources_id == second.resources_id
        assert (await store.enqueue_rollout(0, resources_id="mine")).resources_id == "mine"
        await store.update_resources(first.resources_id, {})
        [one, other] = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=0), EnqueueRolloutRequest(input=0, resources_id="mine")]
        )
        assert (one.resources_id, other.resources_id) == (first.resources_id, "mine")
        claimed = await drain(store)
        assert claimed[0].resources_id is None

    async def test_a_started_rollout_is_never_queued(self, store: LightningStore) -> None:
        rollout = await store.start_rollout({"task": 1}, worker_id="w")
        assert re.fullmatch(r"at-[0-9a-f]{8}", rollout.attempt.attempt_id)
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=1,
            start_time=rollout.start_time,
            worker_id="w",
        )
        expected = AttemptedRollout(
            rollout_id=rollout.rollout_id,
            input={"task": 1},
            start_time=rollout.start_time,
            status="preparing",
            metadata={},
            attempt=attempt,
        )
        assert_same(rollout, expected)
        assert_same(await store.get_rollout_by_id(rollout.rollout_id), expected)
        assert_same(await store.get_latest_attempt(rollout.rollout_id), attempt)
        assert await store.dequeue_rollout() is None

    async def test_a_claim(self, store: LightningStore, advance: Advance) -> None:
        enqueued = await store.enqueue_rollout(1)
        await advance(0.01)
        claimed = attempted(await store.dequeue_rollout(worker_id="w"))
        assert (claimed.status, claimed.end_time, claimed.start_time) == ("preparing", None, enqueued.start_time)
        attempt = claimed.attempt
        assert (attempt.sequence_id, attempt.status, attempt.worker_id) == (1, "preparing", "w")
        assert (attempt.end_time, attempt.last_heartbeat_time, attempt.metadata) == (None, None, None)
        assert attempt.start_time > enqueued.start_time
        assert_same(await store.get_rollout_by_id(claimed.rollout_id), claimed)
        assert await store.dequeue_rollout(worker_id="w") is None
        await store.enqueue_rollout(2)
        assert attempted(await store.dequeue_rollout()).attempt.worker_id is None

    async def test_claims_come_in_queue_order(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(7)])
        assert inputs(await store.dequeue_many_rollouts(limit=3, worker_id="w")) == [0, 1, 2]
        assert inputs([attempted(await store.dequeue_rollout())]) == [3]
        assert inputs(await store.dequeue_many_rollouts()) == [4]
        assert inputs(await store.dequeue_many_rollouts(limit=50)) == [5, 6]
        assert list(await store.dequeue_many_rollouts(limit=50)) == []

    @pytest.mark.parametrize("limit", [0, -1, -7])
    async def test_a_claim_of_nothing_touches_nothing(self, store: LightningStore, limit: int) -> None:
        await store.enqueue_rollout(1)
        before = await contents(store)
        assert list(await store.dequeue_many_rollouts(limit=limit, worker_id="w")) == []
        assert await contents(store) == before
        assert await store.get_worker_by_id("w") is None

    @pytest.mark.parametrize("status", STATUSES)
    async def test_start_attempt_is_allowed_in_any_status(self, store: LightningStore, status: Any) -> None:
        rollout = await store.enqueue_rollout(1)
        other = await store.enqueue_rollout(2)
        await store.update_rollout(rollout.rollout_id, status=status)
        begun = await store.start_attempt(rollout.rollout_id, worker_id="w")
        assert (begun.status, begun.end_time) == ("preparing", None)
        assert (begun.attempt.sequence_id, begun.attempt.status, begun.attempt.worker_id) == (1, "preparing", "w")
        assert_same(await store.get_rollout_by_id(rollout.rollout_id), begun)
        again = await store.start_attempt(rollout.rollout_id)
        assert (again.attempt.sequence_id, again.attempt.worker_id) == (2, None)
        assert again.attempt.attempt_id != begun.attempt.attempt_id
        assert [claimed.rollout_id for claimed in await drain(store)] == [other.rollout_id]

    async def test_unknown_rollouts(self, store: LightningStore) -> None:
        for unknown in ("ro-000000000000", "\x00", "\ud800", "ro with spaces, ?marks=1&more#%2F", "x" * 2000):
            assert await store.get_rollout_by_id(unknown) is None
            assert await store.get_latest_attempt(unknown) is None
            assert (await store.query_attempts(unknown)).total == 0
            with pytest.raises(RecordNotFoundError):
                await store.update_rollout(unknown, status="running")
            with pytest.raises(RecordNotFoundError):
                await store.start_attempt(unknown)
            with pytest.raises(RecordNotFoundError):
                await store.update_attempt(unknown, "latest", status="running")
            assert (await store.query_spans(unknown)).total == 0
            assert (await store.query_rollouts(rollout_id_in=[unknown])).total == 0
        assert await contents(store) == {"rollouts": [], "attempts": [], "spans": [], "resources": [], "workers": []}

    # Updates

    async def test_an_update_sets_what_is_given(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout(
            {"a": 1}, mode="test", resources_id="r", config=RolloutConfig(max_attempts=2), metadata={"m": 1}
        )
        changes: dict[str, Any] = {
            "input": [1],
            "mode": "train",
            "resources_id": "s",
            "config": RolloutConfig(timeout_seconds=9),
            "metadata": {"n": 2},
        }
        expected = rollout
        for name, value in changes.items():
            expected = expected.model_copy(update={name: value})
            assert_same(await store.update_rollout(rollout.rollout_id, **{name: value}), expected)
            assert_same(await store.get_rollout_by_id(rollout.rollout_id), expected)
        for name in ("input", "mode", "resources_id", "metadata"):
            expected = expected.model_copy(update={name: None})
            null: dict[str, Any] = {name: None}
            assert_same(await store.update_rollout(rollout.rollout_id, **null), expected)
            assert_same(await store.get_rollout_by_id(rollout.rollout_id), expected)
        assert_same(await store.update_rollout(rollout.rollout_id), expected)
        assert_same(await store.update_rollout(rollout.rollout_id, **changes), rollout.model_copy(update=changes))

    async def test_status_and_config_cannot_be_null(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout(1)
        refused: list[dict[str, Any]] = [{"status": None}, {"config": None}, {"input": 2, "status": None}]
        for changes in refused:
            with pytest.raises(InvalidRequestError):
                await store.update_rollout(rollout.rollout_id, **changes)
        assert_same(await store.get_rollout_by_id(rollout.rollout_id), rollout)

    async def test_an_update_answers_without_the_attempt(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        updated = await store.update_rollout(started.rollout_id, metadata={"x": 1})
        assert type(updated) is Rollout
        assert type(await store.get_rollout_by_id(started.rollout_id)) is AttemptedRollout

    @pytest.mark.parametrize("before", STATUSES)
    @pytest.mark.parametrize("after", STATUSES)
    async def test_any_status_may_follow_any_other(
        self, store: LightningStore, advance: Advance, before: Any, after: Any
    ) -> None:
        rollout = await store.enqueue_rollout(1)
        first = await store.update_rollout(rollout.rollout_id, status=before)
        await advance(0.005)
        second = await store.update_rollout(rollout.rollout_id, status=after)
        for updated, status in ((first, before), (second, after)):
            assert updated.status == status
            assert (updated.end_time is not None) is (status in ROLLOUT_FINISHED)
        if after in ROLLOUT_FINISHED:
            assert second.end_time is not None
            assert second.end_time > (first.end_time or rollout.start_time)
        assert_same(await store.get_rollout_by_id(rollout.rollout_id), second)
        claimed = [claimed.rollout_id for claimed in await drain(store)]
        assert claimed == [rollout.rollout_id] * (after in ROLLOUT_QUEUED)

    async def test_an_update_of_the_status_leaves_attempt_and_worker(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        attempt, worker = await store.get_latest_attempt(started.rollout_id), await store.get_worker_by_id("w")
        for status in STATUSES:
            await store.update_rollout(started.rollout_id, status=status)
            assert_same(await store.get_latest_attempt(started.rollout_id), attempt)
            assert_same(await store.get_worker_by_id("w"), worker)

    async def test_queueing_again_goes_to_the_tail_once(self, store: LightningStore) -> None:
        first, second, third = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=number) for number in range(3)]
        )
        await store.update_rollout(first.rollout_id, status="requeuing")
        await store.update_rollout(first.rollout_id, status="queuing")
        await store.update_rollout(second.rollout_id, status="running")
        await store.update_rollout(second.rollout_id, status="requeuing")
        await store.update_rollout(second.rollout_id, status="requeuing")
        claimed = await drain(store)
        assert [rollout.rollout_id for rollout in claimed] == [first.rollout_id, third.rollout_id, second.rollout_id]
        assert [rollout.attempt.sequence_id for rollout in claimed] == [1, 1, 1]

    # Queries

    async def test_queries_filter(self, store: LightningStore) -> None:
        one, two, three, four = [await store.enqueue_rollout(number) for number in range(1, 5)]
        await store.update_rollout(two.rollout_id, status="failed")
        await store.start_attempt(three.rollout_id)
        filters: list[tuple[dict[str, Any], list[int]]] = [
            ({}, [1, 2, 3, 4]),
            ({"status_in": ["queuing"]}, [1, 4]),
            ({"status_in": ["failed", "preparing"]}, [2, 3]),
            ({"status_in": []}, []),
            ({"rollout_id_in": [three.rollout_id, "ro-x", one.rollout_id]}, [1, 3]),
            ({"rollout_id_in": []}, []),
            ({"rollout_id_contains": "ro-"}, [1, 2, 3, 4]),
            ({"rollout_id_contains": ""}, [1, 2, 3, 4]),
            ({"rollout_id_contains": "RO-"}, []),
            ({"rollout_id_contains": "r%"}, []),
            ({"rollout_id_contains": four.rollout_id[3:]}, [4]),
            ({"status_in": ["queuing"], "rollout_id_in": [one.rollout_id, two.rollout_id]}, [1]),
            ({"status_in": ["failed"], "rollout_id_contains": four.rollout_id, "filter_logic": "or"}, [2, 4]),
            ({"status_in": ["failed"], "rollout_id_in": [], "filter_logic": "or"}, [2]),
            ({"filter_logic": "or"}, [1, 2, 3, 4]),
            ({"status": ["failed"]}, [2]),
            ({"status": ["failed"], "status_in": ["queuing"]}, [1, 4]),
            ({"rollout_ids": [one.rollout_id]}, [1]),
            ({"rollout_ids": [one.rollout_id], "rollout_id_in": [two.rollout_id]}, [2]),
            ({"status_in": None, "rollout_id_in": None, "rollout_id_contains": None}, [1, 2, 3, 4]),
        ]
        for options, expected in filters:
            page = await store.query_rollouts(**options)
            assert (inputs(page), page.total) == (expected, len(expected)), options

    async def test_queries_show_the_latest_attempt(self, store: LightningStore) -> None:
        await store.enqueue_rollout(1)
        started = await store.start_rollout(2)
        begun = await store.start_attempt(started.rollout_id)
        first, second = (await store.query_rollouts()).items
        assert type(first) is Rollout
        assert_same(second, begun)
        assert_same((await store.query_rollouts(status_in=["preparing"])).items, [begun])

    @pytest.mark.parametrize(
        ("field", "ascending", "descending"),
        [
            ("mode", [2, 5, 4, 1, 3], [3, 1, 4, 2, 5]),
            ("resources_id", [4, 5, 3, 1, 2], [2, 1, 3, 4, 5]),
            ("end_time", [3, 1, 2, 4, 5], [2, 4, 5, 1, 3]),
            ("status", [5, 2, 4, 1, 3], [1, 3, 2, 4, 5]),
        ],
    )
    async def test_queries_sort(
        self, store: LightningStore, advance: Advance, field: str, ascending: list[int], descending: list[int]
    ) -> None:
        given: list[dict[str, Any]] = [
            {"mode": "train", "resources_id": "b"},
            {"resources_id": "c"},
            {"mode": "val", "resources_id": "a"},
            {"mode": "test"},
            {},
        ]
        rollouts = [await store.enqueue_rollout(number, **fields) for number, fields in enumerate(given, 1)]
        statuses: dict[int, Any] = {3: "succeeded", 1: "succeeded", 5: "preparing", 2: "requeuing", 4: "requeuing"}
        for number, status in statuses.items():
            await advance(0.005)
            await store.update_rollout(rollouts[number - 1].rollout_id, status=status)
        assert inputs(await store.query_rollouts(sort_by=field)) == ascending
        assert inputs(await store.query_rollouts(sort_by=field, sort_order="desc")) == descending

    async def test_queries_page(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(10)])
        for limit, offset, expected in [
            (3, 0, [0, 1, 2]),
            (3, 9, [9]),
            (-1, 7, [7, 8, 9]),
            (-1, 0, list(range(10))),
            (5, 50, []),
        ]:
            page = await store.query_rollouts(limit=limit, offset=offset, status_in=["queuing"])
            assert (inputs(page), page.limit, page.offset, page.total) == (expected, limit, offset, 10)
        last = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=2, offset=8)
        assert len(last) == 2

    async def test_impossible_queries_are_refused(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        calls: list[Any] = [
            store.query_rollouts,
            partial(store.query_attempts, started.rollout_id),
            partial(store.query_spans, started.rollout_id),
            store.query_resources,
            store.query_workers,
        ]
        unorderable = ["config", "metadata", "attributes", "resources", "heartbeat_stats"]
        for call, document in zip(calls, unorderable, strict=True):
            for options in (
                {"limit": 0},
                {"limit": -2},
                {"offset": -1},
                {"sort_by": "missing"},
                {"sort_by": document},
                {"sort_by": document, "sort_order": "desc"},
            ):
                with pytest.raises(InvalidRequestError):
                    await call(**options)

    async def test_attempt_of_a_page_is_the_one_of_the_rollout(self, store: LightningStore) -> None:
        rollouts = [await store.start_rollout(number) for number in range(5)]
        for _ in range(2):
            await store.start_attempt(rollouts[2].rollout_id)
        page = await store.query_rollouts(sort_by="start_time", sort_order="desc")
        numbers = {rollout.input: attempted(rollout).attempt.sequence_id for rollout in page}
        assert numbers == {0: 1, 1: 1, 2: 3, 3: 1, 4: 1}
        assert (await attempt_of(store, rollouts[2].rollout_id)).sequence_id == 3
