"""The unmodified upstream client drives a whole lifecycle against our server, on memory, SQLite and PostgreSQL."""

import asyncio
import pickle
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.backends import POSTGRES, SQLITE, ServerThread
from tests.upstream import agl

COUNTED = ("rollouts", "attempts", "spans", "resources", "workers")
PATIENCE = 30.0


@pytest.fixture(params=["memory", SQLITE, POSTGRES])
async def store(request: pytest.FixtureRequest, database_of: Callable[[str], str]) -> LightningStore:
    """The store behind the server, on real time."""
    url = "memory://" if request.param == "memory" else database_of(request.param)
    return await open_store(url, partition=uuid.uuid4().hex, scan_debounce_seconds=0)


@pytest.fixture
async def client(store: LightningStore, server: ServerThread) -> AsyncIterator[agl.LightningStoreClient]:
    async with server.serving(store) as address:
        # Upstream's own patience would only hide a failure for some seconds.
        client = agl.LightningStoreClient(address, retry_delays=(), health_retry_delays=())
        yield client
        await client.close()


def existing(found: Any) -> Any:
    """What a look-up found; it must have found something."""
    assert found is not None
    return found


def readable_span(**attributes: Any) -> Any:
    """A span as the OpenTelemetry SDK hands it to exporters."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("work", attributes=attributes) as span:
        span.add_event("started", {"step": 1})
    [finished] = memory.get_finished_spans()
    provider.shutdown()
    return finished


async def test_a_whole_lifecycle(client: Any) -> None:
    resources = await client.add_resources({"llm": agl.LLM(endpoint="http://model/v1", model="m")})
    enqueued = await client.enqueue_rollout({"task": [1, "ü"]}, mode="train", metadata={"k": 1})
    assert (enqueued.status, enqueued.mode, enqueued.resources_id) == ("queuing", "train", resources.resources_id)
    claimed = await client.dequeue_rollout(worker_id="runner")
    assert isinstance(claimed, agl.AttemptedRollout)
    assert (claimed.rollout_id, claimed.input, claimed.status) == (enqueued.rollout_id, {"task": [1, "ü"]}, "preparing")
    assert (claimed.attempt.sequence_id, claimed.attempt.worker_id) == (1, "runner")
    assert existing(await client.get_worker_by_id("runner")).status == "busy"
    number = await client.get_next_span_sequence_id(claimed.rollout_id, claimed.attempt.attempt_id)
    assert number == 1
    stored = await client.add_span(agl.make_span(claimed, "a", number))
    assert stored is not None
    assert existing(await client.get_rollout_by_id(claimed.rollout_id)).status == "running"
    attempt = await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    assert (attempt.status, attempt.end_time is not None) == ("succeeded", True)
    [finished] = await client.wait_for_rollouts(rollout_ids=[claimed.rollout_id], timeout=0.1)
    assert (finished.status, finished.end_time is not None) == ("succeeded", True)
    worker = await client.get_worker_by_id("runner")
    assert (worker.status, worker.current_rollout_id) == ("idle", None)
    assert await client.dequeue_rollout(worker_id="runner") is None
    statistics = await client.statistics()
    assert {statistics[f"total_{name}"] for name in COUNTED} == {1}


async def test_retries_until_the_last_attempt(client: Any) -> None:
    config = agl.RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"])
    await client.enqueue_rollout("task", config=config)
    other = await client.enqueue_rollout("other")
    seen: list[tuple[str, int]] = []
    while (claimed := await client.dequeue_rollout()) is not None:
        seen.append((claimed.input, claimed.attempt.sequence_id))
        status = "succeeded" if claimed.input == "other" else "failed"
        await client.update_attempt(claimed.rollout_id, "latest", status=status)
    assert seen == [("task", 1), ("other", 1), ("task", 2), ("task", 3)]
    [task, done] = await client.query_rollouts()
    assert (task.status, done.status) == ("failed", "succeeded")
    assert [attempt.status for attempt in await client.query_attempts(task.rollout_id)] == ["failed"] * 3
    again = await client.start_attempt(other.rollout_id, worker_id="w")
    assert (again.status, again.attempt.sequence_id, again.attempt.worker_id) == ("preparing", 2, "w")
    assert existing(await client.get_latest_attempt(other.rollout_id)).attempt_id == again.attempt.attempt_id


async def test_the_watchdog(client: Any) -> None:
    config = agl.RolloutConfig(timeout_seconds=0.1, max_attempts=2, retry_condition=["timeout"])
    slow = await client.start_rollout("slow", config=config, worker_id="w")
    silent = await client.start_rollout("silent", config=agl.RolloutConfig(unresponsive_seconds=0.1))
    fine = await client.start_rollout("fine", config=agl.RolloutConfig(timeout_seconds=60.0, unresponsive_seconds=60.0))
    await asyncio.sleep(0.15)
    claimed = await client.dequeue_many_rollouts(limit=5, worker_id="v")
    assert [(item.input, item.attempt.sequence_id) for item in claimed] == [("slow", 2)]
    attempts = await client.query_attempts(slow.rollout_id)
    assert attempts[0].status == "timeout"
    assert existing(await client.get_worker_by_id("w")).status == "unknown"
    assert existing(await client.get_rollout_by_id(silent.rollout_id)).status == "failed"
    assert existing(await client.get_latest_attempt(silent.rollout_id)).status == "unresponsive"
    assert existing(await client.get_rollout_by_id(fine.rollout_id)).status == "preparing"


async def test_spans(client: Any) -> None:
    started = await client.start_rollout("task")
    key = (started.rollout_id, started.attempt.attempt_id)
    first = agl.make_span(started, "a", 3, name="first", custom={"kept": [1, None]}, parent_id="p")
    stored = await client.add_span(first)
    assert stored is not None
    assert stored.model_dump() == first.model_dump()
    assert await client.add_span(agl.make_span(started, "a", 4, name="again")) is None
    batch = [agl.make_span(started, name, 10 + number) for number, name in enumerate("abca")]
    assert [span.span_id for span in await client.add_many_spans(batch)] == ["b", "c"]
    from_sdk = await client.add_otel_span(*key, readable_span(text="x", numbers=[1, 2]))
    assert from_sdk is not None
    assert (from_sdk.sequence_id, from_sdk.name, from_sdk.attributes["numbers"]) == (13, "work", [1, 2])
    assert [span.sequence_id for span in await client.query_spans(started.rollout_id)] == [3, 11, 12, 13]
    filtered: list[tuple[dict[str, Any], list[int]]] = [
        ({"attempt_id": "latest", "name_contains": "span"}, [11, 12]),
        ({"parent_id": "p"}, [3]),
        ({"name": "first", "span_id": "b", "filter_logic": "or"}, [3, 11]),
        ({"sort_by": "sequence_id", "sort_order": "desc", "limit": 2, "offset": 1}, [12, 11]),
        ({"attempt_id": "at-00000000"}, []),
    ]
    for options, expected in filtered:
        page = await client.query_spans(started.rollout_id, **options)
        assert [span.sequence_id for span in page] == expected, options
    assert list(await client.get_many_span_sequence_ids([key, key])) == [14, 15]


async def test_resources(client: Any) -> None:
    assert await client.get_latest_resources() is None
    first = await client.add_resources({"p": agl.PromptTemplate(template="{x}", engine="f-string")})
    named = await client.update_resources("mine", {"llm": agl.LLM(endpoint="e", model="m", api_key="k")})
    assert (first.version, named.version, named.resources_id) == (1, 1, "mine")
    again = await client.update_resources(first.resources_id, named.resources)
    assert again.version == 2
    latest = await client.get_latest_resources()
    assert latest is not None
    assert latest.model_dump() == again.model_dump()
    assert isinstance(latest.resources["llm"], agl.LLM)
    assert existing(await client.get_resources_by_id("mine")).model_dump() == named.model_dump()
    assert await client.get_resources_by_id("unheard of") is None
    page = await client.query_resources(resources_id_contains="min", sort_by="version", sort_order="desc")
    assert [item.resources_id for item in page] == ["mine"]


async def test_workers(client: Any) -> None:
    beaten = await client.update_worker("w1", {"cpu": 0.5})
    assert (beaten.status, beaten.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    assert (await client.update_worker("w1")).heartbeat_stats == {"cpu": 0.5}
    await client.start_rollout("task", worker_id="w2")
    assert await client.get_worker_by_id("w3") is None
    assert [worker.worker_id for worker in await client.query_workers(status_in=["busy"])] == ["w2"]
    page = await client.query_workers(status_in=["busy"], worker_id_contains="1", filter_logic="or")
    assert [worker.worker_id for worker in page] == ["w1", "w2"]


async def test_updates_and_queries(client: Any) -> None:
    requests = [agl.EnqueueRolloutRequest(input=number) for number in range(5)]
    rollouts = await client.enqueue_many_rollouts(requests)
    assert [rollout.input for rollout in rollouts] == [0, 1, 2, 3, 4]
    updated = await client.update_rollout(rollouts[1].rollout_id, status="cancelled", metadata=None, mode="val")
    assert (updated.status, updated.metadata, updated.mode, updated.input) == ("cancelled", None, "val", 1)
    await client.update_rollout(rollouts[2].rollout_id, config=agl.RolloutConfig(max_attempts=2))
    claimed = await client.dequeue_many_rollouts(limit=2)
    assert [item.input for item in claimed] == [0, 2]
    page = await client.query_rollouts(status_in=["queuing"], sort_by="start_time", limit=1, offset=1)
    assert ([rollout.input for rollout in page], page.total) == ([4], 2)
    ids = [rollouts[1].rollout_id, claimed[0].rollout_id]
    found = {rollout.input: type(rollout) for rollout in await client.query_rollouts(rollout_id_in=ids)}
    assert found == {1: agl.Rollout, 0: agl.AttemptedRollout}
    attempt = await client.update_attempt(
        claimed[0].rollout_id, claimed[0].attempt.attempt_id, worker_id="w", last_heartbeat_time=5.0, metadata={"x": 1}
    )
    assert (attempt.worker_id, attempt.last_heartbeat_time, attempt.metadata) == ("w", 5.0, {"x": 1})


async def test_waits_wake_up(client: Any) -> None:
    started = await client.start_rollout("task")
    with pytest.raises(ValueError, match=r"0\.1 seconds"):
        await client.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=1.0)
    assert await client.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=0.01) == []
    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[started.rollout_id]))
    await asyncio.sleep(0.05)
    await client.update_attempt(started.rollout_id, "latest", status="failed")
    async with asyncio.timeout(PATIENCE):
        assert [rollout.status for rollout in await waiting] == ["failed"]


async def test_the_exporter(client: Any) -> None:
    started = await client.start_rollout("task")
    key = (started.rollout_id, started.attempt.attempt_id)
    span = readable_span(text="x", flag=True)
    exporter = agl.LightningStoreOTLPExporter(endpoint=client.otlp_traces_endpoint())
    exporter.enable_store_otlp(client.otlp_traces_endpoint(), *key)
    assert await asyncio.to_thread(exporter.export, [span]) is SpanExportResult.SUCCESS
    # Sent again, as an exporter does that got no answer: stored once.
    assert await asyncio.to_thread(exporter.export, [span]) is SpanExportResult.SUCCESS
    [stored] = await client.query_spans(started.rollout_id)
    assert (stored.name, stored.sequence_id, stored.attempt_id) == ("work", 1, key[1])
    assert (stored.attributes["text"], stored.attributes["flag"]) == ("x", True)
    assert stored.resource.attributes["agentlightning.rollout_id"] == key[0]
    assert [event.name for event in stored.events] == ["started"]
    assert existing(await client.get_rollout_by_id(started.rollout_id)).status == "running"
    exporter.enable_store_otlp(client.otlp_traces_endpoint(), "ro-000000000000", "at-00000000")
    await asyncio.to_thread(exporter.export, [readable_span()])
    exporter.shutdown()
    assert existing(await client.statistics())["total_spans"] == 1


async def test_unknown_ids(client: Any) -> None:
    assert await client.get_rollout_by_id("ro-000000000000") is None
    assert await client.get_latest_attempt("ro-000000000000") is None
    assert list(await client.query_attempts("ro-000000000000")) == []
    started = await client.start_rollout("task")
    lost = agl.make_span(started, "a", 1, attempt_id="at-00000000")
    for call in (
        client.update_rollout("ro-000000000000", status="running"),
        client.start_attempt("ro-000000000000"),
        client.update_attempt(started.rollout_id, "at-00000000", status="running"),
        client.add_span(lost),
    ):
        with pytest.raises(aiohttp.ClientResponseError) as raised:
            await call
        assert raised.value.status == 404


async def test_a_pickled_client_works(client: Any) -> None:
    await client.enqueue_rollout("task")
    copy = pickle.loads(pickle.dumps(client))
    claimed = await copy.dequeue_rollout()
    assert claimed is not None
    assert claimed.input == "task"
    await copy.close()


async def test_many_runners_at_once(client: Any) -> None:
    total = 40
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    await client.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n, config=config) for n in range(total)])

    async def run(name: str) -> list[tuple[int, int]]:
        done: list[tuple[int, int]] = []
        while (claimed := await client.dequeue_rollout(worker_id=name)) is not None:
            number = claimed.attempt.sequence_id
            await client.add_span(agl.make_span(claimed, f"{claimed.attempt.attempt_id} {number}", number))
            status = "failed" if number == 1 and claimed.input % 2 else "succeeded"
            await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status)
            done.append((claimed.input, number))
        return done

    async with asyncio.timeout(PATIENCE):
        shares = await asyncio.gather(*(run(f"w{number}") for number in range(8)))
    expected = [(n, 1) for n in range(total)] + [(n, 2) for n in range(total) if n % 2]
    assert sorted(item for share in shares for item in share) == sorted(expected)
    assert {rollout.status for rollout in await client.query_rollouts()} == {"succeeded"}
    assert existing(await client.statistics())["total_spans"] == len(expected)
