"""Upstream's own collection-based store on our SQL collections, with upstream's item types."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lightning_sql.collections.sql import ItemTypes, SqlCollections
from lightning_sql.database.engine import Database
from tests.backends import POSTGRES
from tests.upstream import agl

COUNTED = ("rollouts", "attempts", "spans", "resources", "workers")
PATIENCE = 60.0

UPSTREAM_TYPES = ItemTypes(
    rollout=agl.Rollout,
    attempt=agl.Attempt,
    span=agl.Span,
    resources=agl.ResourcesUpdate,
    worker=agl.Worker,
)


def upstream_collections(database_url: str, partition: str) -> SqlCollections:
    return SqlCollections(
        Database(database_url),
        partition=partition,
        item_types=UPSTREAM_TYPES,
        duplicate_error=agl.DuplicatedPrimaryKeyError,
    )


@pytest.fixture(params=["sqlite", POSTGRES])
async def collections(
    request: pytest.FixtureRequest, database_of: Callable[[str], str]
) -> AsyncIterator[SqlCollections]:
    collections = upstream_collections(database_of(request.param), uuid.uuid4().hex)
    yield collections
    await collections.close()


@pytest.fixture(params=[False, True], ids=["plain reads", "snapshot reads"])
def store(request: pytest.FixtureRequest, collections: SqlCollections) -> Any:
    """Upstream's store; it is typed for its own collections, which ours only resemble."""
    ours: Any = collections
    return agl.CollectionBasedLightningStore(ours, read_snapshot=request.param, scan_debounce_seconds=0)


async def test_a_whole_lifecycle(store: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        resources = await store.add_resources({"llm": agl.LLM(endpoint="http://model/v1", model="m")})
        enqueued = await store.enqueue_rollout({"task": [1, "ü"]}, mode="train", metadata={"b": 1, "a": 2})
        claimed = await store.dequeue_rollout(worker_id="w")
        assert isinstance(claimed, agl.AttemptedRollout)
        assert (claimed.rollout_id, claimed.resources_id) == (enqueued.rollout_id, resources.resources_id)
        assert (claimed.status, claimed.attempt.sequence_id) == ("preparing", 1)
        assert (await store.get_worker_by_id("w")).status == "busy"
        number = await store.get_next_span_sequence_id(claimed.rollout_id, claimed.attempt.attempt_id)
        span = agl.make_span(claimed, "a", number, custom={"kept": [1, None]})
        stored = await store.add_span(span)
        assert stored.model_dump() == span.model_dump()
        assert (await store.get_rollout_by_id(claimed.rollout_id)).status == "running"
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        [finished] = await store.wait_for_rollouts(rollout_ids=[claimed.rollout_id], timeout=0)
        assert (finished.status, finished.metadata) == ("succeeded", {"b": 1, "a": 2})
        assert type(finished) is agl.Rollout
        assert (await store.get_worker_by_id("w")).status == "idle"
        assert await store.dequeue_rollout(worker_id="w") is None
        statistics = await store.statistics()
        assert {statistics[f"total_{name}"] for name in COUNTED} == {1}


async def test_duplicates_of_spans(store: Any, collections: SqlCollections) -> None:
    async with asyncio.timeout(PATIENCE):
        started = await store.start_rollout("task")
        first = agl.make_span(started, "a", 1, name="first")
        await store.add_span(first)
        assert await store.add_span(agl.make_span(started, "a", 2, name="again")) is None
        batch = [agl.make_span(started, name, 10 + number) for number, name in enumerate("bac")]
        added = await store.add_many_spans(batch)
        assert [span.span_id for span in added] == ["b", "c"]
        spans = await store.query_spans(started.rollout_id)
        assert [(span.span_id, span.name) for span in spans] == [("a", "first"), ("b", "span b"), ("c", "span c")]
        with pytest.raises(agl.DuplicatedPrimaryKeyError):
            await collections.spans.insert([first])


async def test_retries_and_the_watchdog(store: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        config = agl.RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"], timeout_seconds=0.2)
        rollout = await store.enqueue_rollout("task", config=config)
        claimed = await store.dequeue_rollout(worker_id="w")
        await store.update_attempt(claimed.rollout_id, "latest", status="failed")
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"
        second = await store.dequeue_rollout(worker_id="w")
        assert second.attempt.sequence_id == 2
        await asyncio.sleep(0.25)
        third = await store.dequeue_rollout(worker_id="w")
        assert third.attempt.sequence_id == 3
        await store.update_attempt(third.rollout_id, "latest", status="failed")
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "failed"
        attempts = await store.query_attempts(rollout.rollout_id)
        assert [attempt.status for attempt in attempts] == ["failed", "timeout", "failed"]
        assert await store.dequeue_rollout() is None
        again = await store.start_attempt(rollout.rollout_id)
        assert again.attempt.sequence_id == 4


async def test_everything_else(store: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        rollouts = await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(5)])
        await store.update_rollout(rollouts[1].rollout_id, status="cancelled", metadata=None)
        claimed = await store.dequeue_many_rollouts(limit=2, worker_id="w")
        assert [item.input for item in claimed] == [0, 2]
        page = await store.query_rollouts(status_in=["queuing"], sort_by="start_time", sort_order="desc", limit=5)
        assert ({rollout.input for rollout in page}, page.total) == ({3, 4}, 2)
        ids = [rollouts[1].rollout_id, rollouts[4].rollout_id]
        page = await store.query_rollouts(rollout_id_in=ids, rollout_id_contains="ro-", status_in=["cancelled"])
        assert [rollout.input for rollout in page] == [1]
        first = await store.update_resources("mine", {"p": agl.PromptTemplate(template="", engine="jinja")})
        second = await store.update_resources("mine", {"llm": agl.LLM(endpoint="e", model="m")})
        assert (first.version, second.version) == (1, 2)
        latest = await store.get_latest_resources()
        assert isinstance(latest.resources["llm"], agl.LLM)
        beaten = await store.update_worker("w", {"cpu": 0.5})
        assert (beaten.status, beaten.heartbeat_stats) == ("busy", {"cpu": 0.5})
        assert [worker.worker_id for worker in await store.query_workers(status_in=["busy"])] == ["w"]
        numbers = await store.get_many_span_sequence_ids([(rollouts[0].rollout_id, "x"), (rollouts[0].rollout_id, "y")])
        assert list(numbers) == [1, 2]
        with pytest.raises(ValueError, match="ro-0"):
            await store.update_rollout("ro-000000000000", status="running")


async def test_concurrent_claims(store: Any) -> None:
    total = 40
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=number) for number in range(total)])

    async def run(name: str) -> list[int]:
        done: list[int] = []
        while (claimed := await store.dequeue_rollout(worker_id=name)) is not None:
            assert claimed.attempt.sequence_id == 1
            await store.add_span(agl.make_span(claimed, "a", 1))
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
            done.append(claimed.input)
        return done

    async with asyncio.timeout(PATIENCE):
        shares = await asyncio.gather(*(run(f"w{number}") for number in range(6)))
        assert sorted(item for share in shares for item in share) == list(range(total))
        statistics = await store.statistics()
        assert (statistics["total_attempts"], statistics["total_spans"]) == (total, total)
        assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}


async def test_concurrent_attempts_of_one_rollout(store: Any) -> None:
    rollout = await store.enqueue_rollout("task")
    async with asyncio.timeout(PATIENCE):
        begun = await asyncio.gather(*(store.start_attempt(rollout.rollout_id) for _ in range(8)))
    assert sorted(item.attempt.sequence_id for item in begun) == list(range(1, 9))
