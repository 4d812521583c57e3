"""Spans of a client that go together, spans that have no number, and the exporter of OpenTelemetry's SDK."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

from lightning_api.client import LightningClient
from lightning_api.client_transport import Transport
from lightning_api.otel_exporter import LightningSpanExporter
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.testing.samples import make_span
from tests.backends import ServerThread

PATIENCE = 30.0


@pytest.fixture
async def client(server: ServerThread) -> AsyncIterator[LightningClient]:
    async with server.serving(CollectionStore(MemoryCollections(), scan_debounce_seconds=0)) as address:
        async with LightningClient(address) as client:
            yield client


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are asked for."""
    asked: list[str] = []
    request = Transport._request

    async def noting(self: Transport, method: str, path: str, *rest: object) -> object:
        asked.append(path)
        return await request(self, method, path, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Transport, "_request", noting)
    return asked


async def test_spans_that_come_while_others_are_on_their_way_go_together(
    client: LightningClient, paths: list[str]
) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    paths.clear()
    spans = [make_span(*ids, f"s{number}") for number in range(40)]
    stored = await asyncio.gather(*(client.add_span(span) for span in spans))
    assert stored == spans
    assert len(paths) <= 3
    assert [span.span_id for span in await client.query_spans(started.rollout_id)] == [span.span_id for span in spans]
    assert await client.add_span(spans[3]) is None


async def test_each_of_them_is_answered_for_itself(client: LightningClient) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    offered = [
        make_span(*ids, "a"),
        make_span(*ids, "b"),
        make_span("ro-none", "at-none", "c"),
        make_span(*ids, "b"),
        make_span(*ids, "d"),
    ]
    outcomes = await asyncio.gather(*(client.add_span(span) for span in offered), return_exceptions=True)
    assert outcomes[0] == offered[0]
    assert outcomes[1] == offered[1]
    assert isinstance(outcomes[2], RecordNotFoundError)
    assert outcomes[3] is None
    assert outcomes[4] == offered[4]
    with pytest.raises(RecordNotFoundError):
        await client.add_many_spans([make_span(*ids, "e"), offered[2]])
    assert [span.span_id for span in await client.query_spans(started.rollout_id)] == ["a", "b", "d", "e"]


async def test_who_gives_up_takes_nobody_along(client: LightningClient) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    adding = [asyncio.create_task(client.add_span(make_span(*ids, f"s{number}"))) for number in range(6)]
    await asyncio.sleep(0)
    adding[0].cancel()
    adding[3].cancel()
    await asyncio.wait(adding)
    assert [task.cancelled() for task in adding] == [True, False, False, True, False, False]
    assert all(task.result() is not None for task in adding if not task.cancelled())


async def test_spans_without_a_number_get_the_next_ones_in_one_request(
    client: LightningClient, paths: list[str]
) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    await client.add_span(make_span(*ids, "first", sequence_id=7))
    paths.clear()
    spans = [make_span(*ids, "a"), make_span(*ids, "b", sequence_id=20), make_span("ro-none", "at", "c")]
    receipt = await client.import_spans([*spans, make_span(*ids, "first")], unnumbered={0, 2, 3, 9})
    assert paths == ["/v1/lightning/spans"]
    assert [(span.span_id, span.sequence_id) for span in receipt.stored] == [("a", 8), ("b", 20)]
    assert receipt.duplicates == 1
    assert [span.span_id for span in receipt.rejected] == ["c"]


@pytest.mark.parametrize("processor", [SimpleSpanProcessor, BatchSpanProcessor])
async def test_the_exporter_stores_spans_of_the_sdk(
    client: LightningClient,
    processor: type[SimpleSpanProcessor | BatchSpanProcessor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, other = await client.start_rollout(1), await client.start_rollout(2)
    named = {"agentlightning.rollout_id": other.rollout_id, "agentlightning.attempt_id": other.attempt.attempt_id}
    before = set(threading.enumerate())

    def trace(resource: dict[str, str], rollout_id: str | None, attempt_id: str | None) -> None:
        exporter = LightningSpanExporter(client.base_url, rollout_id=rollout_id, attempt_id=attempt_id)
        provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
        provider.add_span_processor(processor(exporter))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("outer", attributes={"n": 1}):
            with tracer.start_as_current_span("inner"):
                pass
        provider.shutdown()

    async with asyncio.timeout(PATIENCE):
        await asyncio.to_thread(trace, {}, started.rollout_id, started.attempt.attempt_id)
        await asyncio.to_thread(trace, named, started.rollout_id, started.attempt.attempt_id)
        await asyncio.to_thread(trace, {}, None, None)
        await asyncio.to_thread(trace, {}, "ro-none", "at-none")
    for rollout in (started, other):
        spans = list(await client.query_spans(rollout.rollout_id))
        assert [(span.name, span.sequence_id) for span in spans] == [("inner", 1), ("outer", 2)]
        assert spans[0].parent_id == spans[1].span_id
        assert spans[1].attributes == {"n": 1}
    assert "names no rollout and attempt" in caplog.text
    assert "is of an attempt that does not exist" in caplog.text
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("lightning-sql")}
