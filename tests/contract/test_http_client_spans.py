"""Spans of a client that go together, spans that have no number, and the exporter of OpenTelemetry's SDK."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext

from lightning_api.client import LightningClient
from lightning_api.client_together import Asked
from lightning_api.client_transport import Transport
from lightning_api.otel_exporter import LightningSpanExporter
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
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

    async def noting(self: Transport, call: Asked, *rest: float) -> object:
        asked.append(call.path)
        return await request(self, call, *rest)

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


async def test_spans_that_are_too_large_together_are_stored_each(client: LightningClient) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    spans = [make_span(*ids, f"s{number}", attributes={"text": "x" * 1_000_000}) for number in range(12)]
    assert await asyncio.gather(*(client.add_span(span) for span in spans)) == spans
    assert await client.add_many_spans(spans) == []
    assert (await client.query_spans(ids[0], limit=1)).total == len(spans)


@pytest.mark.parametrize("attributes", [{"value": object()}, {(1, 2): "key"}])
async def test_a_span_that_cannot_be_written_fails_alone(client: LightningClient, attributes: Any) -> None:
    started = await client.start_rollout(1)
    ids = started.rollout_id, started.attempt.attempt_id
    bad = make_span(*ids, "bad").model_copy(update={"attributes": attributes})
    spans = [make_span(*ids, f"s{number}") for number in range(4)]
    found = await asyncio.gather(*map(client.add_span, [*spans[:2], bad, *spans[2:]]), return_exceptions=True)
    assert isinstance(found.pop(2), InvalidRequestError)
    assert found == spans


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
async def test_an_exporter_may_be_forked_and_is_over_when_it_is_shut_down(client: LightningClient) -> None:
    started = await client.start_rollout(1)
    exporter = LightningSpanExporter(
        client.base_url, rollout_id=started.rollout_id, attempt_id=started.attempt.attempt_id
    )
    ended = ReadableSpan("s", context=SpanContext(1, 2, is_remote=False), start_time=1, end_time=2)
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(exporter.export, [ended]) is SpanExportResult.SUCCESS
        child = os.fork()
        if not child:
            status = 1
            try:
                other = ReadableSpan("t", context=SpanContext(1, 3, is_remote=False), start_time=1, end_time=2)
                status = 0 if exporter.export([other]) is SpanExportResult.SUCCESS else 1
                exporter.shutdown()
            finally:
                os._exit(status)
        assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
        assert [span.name for span in await client.query_spans(started.rollout_id)] == ["s", "t"]
        await asyncio.to_thread(exporter.shutdown)
        assert exporter.export([ended]) is SpanExportResult.FAILURE


async def test_an_export_ends_when_the_exporter_is_shut_down() -> None:
    writers: list[asyncio.StreamWriter] = []
    connected = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.set()

    server = await asyncio.start_server(silent, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    exporter = LightningSpanExporter(f"http://127.0.0.1:{port}", rollout_id="r", attempt_id="a")
    ended = ReadableSpan("s", context=SpanContext(1, 2, is_remote=False), start_time=1, end_time=2)
    exporting = asyncio.create_task(asyncio.to_thread(exporter.export, [ended]))
    async with asyncio.timeout(PATIENCE):
        await connected.wait()
        await asyncio.to_thread(exporter.shutdown)
        assert await exporting is SpanExportResult.FAILURE
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
