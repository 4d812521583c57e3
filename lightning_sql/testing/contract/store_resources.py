"""How resources are versioned, and how workers are kept track of."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from lightning_sql.records import (
    LLM,
    EnqueueRolloutRequest,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Worker,
)
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import Advance, StoreFixtures, attempted, retrying, worker_of
from lightning_sql.testing.samples import assert_same

__all__ = ["ResourcesContract", "WorkerContract"]

RESOURCES: NamedResources = {
    "zeta": LLM(endpoint="http://model/v1", model="m", sampling_parameters={"top_p": 0.5, "stop": ["a", None]}),
    "alpha": ProxyLLM(endpoint="http://proxy", model="m", api_key="secret"),
    "": PromptTemplate(template="{{ x }}", engine="jinja"),
}
OTHER: NamedResources = {"prompt": PromptTemplate(template="", engine="poml")}


class ResourcesContract(StoreFixtures):
    """Section 7.10 of the contract."""

    async def test_nothing_yet(self, store: LightningStore) -> None:
        assert await store.get_latest_resources() is None
        assert await store.get_resources_by_id("rs-000000000000") is None
        assert (await store.query_resources()).total == 0

    async def test_adding(self, store: LightningStore) -> None:
        added = await store.add_resources(RESOURCES)
        assert re.fullmatch(r"rs-[0-9a-f]{12}", added.resources_id)
        assert (added.version, added.create_time) == (1, added.update_time)
        assert_same(added.resources, RESOURCES)
        for read in (
            await store.get_resources_by_id(added.resources_id),
            await store.get_latest_resources(),
            (await store.query_resources())[0],
        ):
            assert_same(read, added)
        empty = await store.add_resources({})
        assert_same(await store.get_latest_resources(), empty)
        assert empty.resources_id != added.resources_id

    async def test_updating(self, store: LightningStore, advance: Advance) -> None:
        added = await store.add_resources(RESOURCES)
        await advance(0.005)
        updated = await store.update_resources(added.resources_id, OTHER)
        assert updated.update_time > added.update_time
        expected = added.model_copy(update={"version": 2, "update_time": updated.update_time, "resources": OTHER})
        assert_same(updated, expected)
        assert_same(await store.get_resources_by_id(added.resources_id), expected)
        assert (await store.query_resources()).total == 1

    async def test_updating_creates_what_is_missing(self, store: LightningStore) -> None:
        created = await store.update_resources("my own id", RESOURCES)
        assert (created.resources_id, created.version, created.create_time) == ("my own id", 1, created.update_time)
        assert_same(await store.get_resources_by_id("my own id"), created)
        assert_same(await store.get_latest_resources(), created)

    async def test_latest_is_what_was_written_last(self, store: LightningStore) -> None:
        """Also when several writes fall into one tick of the clock."""
        first = await store.add_resources(RESOURCES)
        second = await store.add_resources(RESOURCES)
        writes = [first, second]
        for resources_id in (first.resources_id, "mine", second.resources_id, "mine", first.resources_id):
            written = await store.update_resources(resources_id, OTHER)
            latest = await store.get_latest_resources()
            assert_same(latest, written)
            writes.append(written)
        times = [written.update_time for written in writes]
        assert times == sorted(set(times))
        assert [(await store.query_resources())[index].version for index in range(3)] == [3, 2, 2]

    async def test_concurrent_updates_count_every_version(self, store: LightningStore) -> None:
        writes = await asyncio.gather(*(store.update_resources("shared", OTHER) for _ in range(20)))
        assert sorted(write.version for write in writes) == list(range(1, 21))
        latest = await store.get_latest_resources()
        assert latest is not None
        assert latest.version == 20
        assert len({write.update_time for write in writes}) == 20
        assert len({write.create_time for write in writes}) == 1

    async def test_queries(self, store: LightningStore) -> None:
        for resources_id in ("b", "a%", "c", "Ab"):
            await store.update_resources(resources_id, OTHER)
        await store.update_resources("a%", RESOURCES)

        async def found(**options: Any) -> list[str]:
            return [resources.resources_id for resources in await store.query_resources(**options)]

        assert await found() == ["b", "a%", "c", "Ab"]
        assert await found(resources_id="c") == ["c"]
        assert await found(resources_id="x") == []
        assert await found(resources_id_contains="b") == ["b", "Ab"]
        assert await found(resources_id_contains="%") == ["a%"]
        assert await found(resources_id_contains="A") == ["Ab"]
        assert await found(resources_id="b", resources_id_contains="b") == ["b"]
        assert await found(resources_id="c", resources_id_contains="b") == []
        assert await found(sort_by="resources_id") == ["Ab", "a%", "b", "c"]
        assert await found(sort_by="version", sort_order="desc") == ["a%", "b", "c", "Ab"]
        assert await found(sort_by="update_time", sort_order="desc") == ["a%", "Ab", "c", "b"]
        page = await store.query_resources(limit=2, offset=1)
        assert ([item.resources_id for item in page], page.total) == (["a%", "c"], 4)
        assert all(type(item) is ResourcesUpdate for item in page)


class WorkerContract(StoreFixtures):
    """Section 8 of the contract."""

    async def test_a_heartbeat(self, store: LightningStore, advance: Advance) -> None:
        assert await store.get_worker_by_id("w") is None
        first = await store.update_worker("w")
        assert first.last_heartbeat_time is not None
        assert_same(first, Worker(worker_id="w", last_heartbeat_time=first.last_heartbeat_time))
        await advance(0.005)
        second = await store.update_worker("w", {"b": 1, "a": {"deep": []}})
        assert second.last_heartbeat_time is not None
        assert second.last_heartbeat_time > first.last_heartbeat_time
        assert_same(second.heartbeat_stats, {"b": 1, "a": {"deep": []}})
        third = await store.update_worker("w")
        assert_same(third.heartbeat_stats, second.heartbeat_stats)
        fourth = await store.update_worker("w", {})
        assert fourth.heartbeat_stats == {}
        assert_same(await store.get_worker_by_id("w"), fourth)
        nothing: Any = None
        with pytest.raises(TypeError):
            await store.update_worker("w", heartbeat_stats=nothing)
        with pytest.raises(TypeError):
            await store.update_worker("new", heartbeat_stats=nothing)
        assert_same((await store.query_workers()).items, [fourth])

    async def test_a_heartbeat_leaves_the_rest(self, store: LightningStore) -> None:
        await store.start_rollout(1, worker_id="w")
        busy = await worker_of(store, "w")
        beaten = await store.update_worker("w", {"cpu": 0.5})
        changed = {"last_heartbeat_time": beaten.last_heartbeat_time, "heartbeat_stats": {"cpu": 0.5}}
        assert_same(beaten, busy.model_copy(update=changed))

    async def test_a_claim_makes_it_busy(self, store: LightningStore, advance: Advance) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
        first, second = await store.dequeue_many_rollouts(limit=2, worker_id="w")
        now = first.attempt.start_time
        expected = Worker(
            worker_id="w",
            status="busy",
            last_dequeue_time=now,
            last_busy_time=now,
            current_rollout_id=second.rollout_id,
            current_attempt_id=second.attempt.attempt_id,
        )
        assert_same(await store.get_worker_by_id("w"), expected)
        await advance(0.005)
        third = attempted(await store.dequeue_rollout(worker_id="w"))
        worker = await worker_of(store, "w")
        assert (worker.current_rollout_id, worker.last_busy_time) == (third.rollout_id, third.attempt.start_time)
        await store.dequeue_rollout()
        assert [item.worker_id for item in await store.query_workers()] == ["w"]

    async def test_start_and_start_attempt_make_it_busy(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        expected = Worker(
            worker_id="w",
            status="busy",
            last_busy_time=started.start_time,
            current_rollout_id=started.rollout_id,
            current_attempt_id=started.attempt.attempt_id,
        )
        assert_same(await worker_of(store, "w"), expected)
        begun = await store.start_attempt(started.rollout_id, worker_id="v")
        assert_same(
            await worker_of(store, "v"),
            Worker(
                worker_id="v",
                status="busy",
                last_busy_time=begun.attempt.start_time,
                current_rollout_id=begun.rollout_id,
                current_attempt_id=begun.attempt.attempt_id,
            ),
        )
        assert_same(await worker_of(store, "w"), expected)

    async def test_an_empty_claim(self, store: LightningStore, advance: Advance) -> None:
        assert await store.dequeue_rollout(worker_id="new") is None
        new = await worker_of(store, "new")
        assert new.last_dequeue_time is not None
        assert_same(
            new,
            Worker(
                worker_id="new",
                status="idle",
                last_dequeue_time=new.last_dequeue_time,
                last_idle_time=new.last_dequeue_time,
            ),
        )
        await advance(0.005)
        assert list(await store.dequeue_many_rollouts(limit=3, worker_id="new")) == []
        again = await worker_of(store, "new")
        assert again.last_dequeue_time is not None
        assert again.last_dequeue_time > new.last_dequeue_time
        assert_same(again, new.model_copy(update={"last_dequeue_time": again.last_dequeue_time}))
        await store.start_rollout(1, worker_id="new")
        busy = await worker_of(store, "new")
        await store.dequeue_rollout(worker_id="new")
        idle = await worker_of(store, "new")
        assert idle.status == "idle"
        assert idle.last_idle_time == idle.last_dequeue_time
        assert (idle.current_rollout_id, idle.current_attempt_id) == (busy.current_rollout_id, busy.current_attempt_id)
        assert await store.dequeue_rollout() is None
        assert (await store.query_workers()).total == 1

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            ("preparing", "busy"),
            ("running", "busy"),
            ("succeeded", "idle"),
            ("failed", "idle"),
            ("timeout", "unknown"),
            ("unresponsive", "unknown"),
        ],
    )
    async def test_it_follows_its_attempt(
        self, store: LightningStore, advance: Advance, status: Any, expected: str
    ) -> None:
        started = await store.start_rollout(1, worker_id="w", config=retrying())
        before = await worker_of(store, "w")
        await advance(0.005)
        await store.update_attempt(started.rollout_id, "latest", status=status)
        after = await worker_of(store, "w")
        assert after.status == expected
        assert before.last_busy_time is not None
        if expected == "busy":
            assert after.last_busy_time is not None
            assert after.last_busy_time > before.last_busy_time
            assert_same(after, before.model_copy(update={"last_busy_time": after.last_busy_time}))
        else:
            assert after.last_idle_time is not None
            assert after.last_idle_time > before.last_busy_time
            cleared = {"current_rollout_id": None, "current_attempt_id": None}
            changed = {"status": expected, "last_idle_time": after.last_idle_time, **cleared}
            assert_same(after, before.model_copy(update=changed))

    async def test_only_status_and_worker_of_an_attempt_move_it(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        before = await worker_of(store, "w")
        await store.update_attempt(started.rollout_id, "latest", metadata={"x": 1})
        await store.update_attempt(started.rollout_id, "latest", last_heartbeat_time=1.0)
        await store.update_rollout(started.rollout_id, status="succeeded")
        assert_same(await worker_of(store, "w"), before)

    async def test_an_attempt_that_changes_hands(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        before = await worker_of(store, "w")
        await store.update_attempt(started.rollout_id, "latest", worker_id="v")
        taken = await worker_of(store, "v")
        assert (taken.status, taken.current_attempt_id) == ("busy", started.attempt.attempt_id)
        assert_same(await worker_of(store, "w"), before)
        await store.update_attempt(started.rollout_id, "latest", status="succeeded", worker_id="u")
        assert (await worker_of(store, "u")).status == "idle"
        assert (await worker_of(store, "v")).status == "busy"
        await store.update_attempt(started.rollout_id, "latest", worker_id="")
        await store.update_attempt(started.rollout_id, "latest", status="failed")
        assert [worker.worker_id for worker in await store.query_workers()] == ["w", "v", "u"]

    async def test_an_older_attempt_still_moves_it(self, store: LightningStore) -> None:
        """No check is made that the worker is on this attempt, as in the protocol's first server."""
        old = await store.start_rollout(1, worker_id="w")
        await store.start_rollout(2, worker_id="w")
        await store.update_attempt(old.rollout_id, "latest", status="succeeded")
        worker = await worker_of(store, "w")
        assert (worker.status, worker.current_rollout_id) == ("idle", None)
        await store.start_attempt(old.rollout_id)
        await store.update_attempt(old.rollout_id, old.attempt.attempt_id, status="running")
        assert (await worker_of(store, "w")).current_attempt_id == old.attempt.attempt_id

    async def test_queries(self, store: LightningStore, advance: Advance) -> None:
        await store.start_rollout(1, worker_id="busy_1")
        await advance(0.005)
        await store.update_worker("Quiet", {"x": 1})
        await store.dequeue_rollout(worker_id="idle%1")
        await store.start_rollout(2, worker_id="busy_2")
        await store.update_worker("busy_1")

        async def found(**options: Any) -> list[str]:
            return [worker.worker_id for worker in await store.query_workers(**options)]

        assert await found() == ["busy_1", "Quiet", "idle%1", "busy_2"]
        assert await found(status_in=["busy"]) == ["busy_1", "busy_2"]
        assert await found(status_in=["idle", "unknown"]) == ["Quiet", "idle%1"]
        assert await found(status_in=[]) == []
        assert await found(worker_id_contains="_") == ["busy_1", "busy_2"]
        assert await found(worker_id_contains="q") == []
        assert await found(status_in=["busy"], worker_id_contains="1") == ["busy_1"]
        either = await found(status_in=["busy"], worker_id_contains="%", filter_logic="or")
        assert either == ["busy_1", "idle%1", "busy_2"]
        assert await found(filter_logic="or") == ["busy_1", "Quiet", "idle%1", "busy_2"]
        assert await found(sort_by="worker_id") == ["Quiet", "busy_1", "busy_2", "idle%1"]
        assert (await found(sort_by="current_rollout_id"))[:2] == ["Quiet", "idle%1"]
        assert await found(sort_by="last_idle_time") == ["idle%1", "busy_1", "Quiet", "busy_2"]
        assert await found(sort_by="last_idle_time", sort_order="desc") == ["busy_1", "Quiet", "busy_2", "idle%1"]
        page = await store.query_workers(limit=2, offset=1)
        assert ([worker.worker_id for worker in page], page.total) == (["Quiet", "idle%1"], 4)
