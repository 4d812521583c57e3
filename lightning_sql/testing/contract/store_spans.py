"""How spans are stored, numbered and found, and what they say about their attempt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import AttemptedRollout, Event, Link, OtelResource, Span, SpanContext, TraceStatus
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    Advance,
    StoreFixtures,
    attempt_of,
    contents,
    drain,
    retrying,
    rollout_of,
    worker_of,
)
from lightning_sql.testing.samples import assert_same, make_span, sdk_span

__all__ = ["SpanContract"]

CONTEXT: dict[str, Any] = {"trace_id": "t", "span_id": "s", "is_remote": True, "trace_state": {"k": "v"}, "more": [1]}
FULL: dict[str, Any] = {
    "parent_id": "p",
    "name": "everything",
    "status": {"status_code": "ERROR", "description": "why", "more": {"x": None}},
    "attributes": {"z": "text", "b": True, "i": 1, "f": 1.0, "n": -0.0, "ls": ["a", ""], "lb": [True], "le": []}
    | {"li": [2**70], "lf": [0.1]},
    "events": [{"name": "e", "attributes": {"k": 1}, "timestamp": 1.25, "more": 1}, {"name": "f", "attributes": {}}],
    "links": [{"context": CONTEXT, "attributes": {"k": [1, 2]}, "more": "x"}, {"context": CONTEXT}],
    "start_time": 1.5,
    "end_time": None,
    "context": CONTEXT,
    "parent": CONTEXT | {"span_id": "parent"},
    "resource": {"attributes": {"service.name": "x"}, "schema_url": "https://schema.example"},
    "custom": {"b": [1, {"a": None}], "a": 2},
    "another": None,
}  # fmt: skip


def span_of(rollout: AttemptedRollout, span_id: str, sequence_id: int = 1, **fields: Any) -> Span:
    """A span of the attempt that a rollout came with."""
    return make_span(rollout.rollout_id, rollout.attempt.attempt_id, span_id, sequence_id, **fields)


class SpanContract(StoreFixtures):
    """Sections 7.6 and 7.9 of the contract, the span queries of section 5, laws 7 and 8."""

    @pytest.fixture
    async def started(self, store: LightningStore) -> AttemptedRollout:
        """A rollout with its first attempt."""
        return await store.start_rollout(1, worker_id="w")

    async def found(self, store: LightningStore, rollout_id: str, *args: Any, **options: Any) -> list[str]:
        """The ids of the spans that a query gives."""
        page = await store.query_spans(rollout_id, *args, **options)
        if "limit" not in options:
            assert page.total == len(page)
        return [span.span_id for span in page]

    async def test_a_span_comes_back_exactly(self, store: LightningStore, started: AttemptedRollout) -> None:
        full = span_of(started, "full", 5, **FULL)
        assert_same(await store.add_span(full), full)
        bare = span_of(started, "bare", -3, start_time=None, end_time=None)
        assert_same(await store.add_span(bare), bare)
        assert_same((await store.query_spans(started.rollout_id)).items, [bare, full])
        assert isinstance(full.events[0], Event)
        assert isinstance(full.links[0], Link)

    async def test_a_duplicate_is_skipped(self, store: LightningStore, started: AttemptedRollout) -> None:
        first = span_of(started, "a", 1, name="first")
        await store.add_span(first)
        assert await store.add_span(span_of(started, "a", 9, name="second")) is None
        assert_same((await store.query_spans(started.rollout_id)).items, [first])
        assert await store.get_next_span_sequence_id(started.rollout_id, "any") == 2

    async def test_a_span_is_known_by_its_attempt_and_id(
        self, store: LightningStore, started: AttemptedRollout
    ) -> None:
        begun = await store.start_attempt(started.rollout_id)
        other = await store.start_rollout(2)
        for rollout in (started, begun, other):
            assert await store.add_span(span_of(rollout, "same")) is not None
            assert await store.add_span(span_of(rollout, "same")) is None
        assert (await store.query_spans(started.rollout_id)).total == 2
        assert (await store.query_spans(other.rollout_id)).total == 1

    async def test_many_spans_answer_with_what_was_stored(
        self, store: LightningStore, started: AttemptedRollout
    ) -> None:
        begun = await store.start_attempt(started.rollout_id)
        other = await store.start_rollout(2)
        await store.add_span(span_of(started, "known", 1))
        spans = [
            span_of(other, "a", 4),
            span_of(started, "known", 50, name="too late"),
            span_of(begun, "b", 3),
            span_of(other, "c", 2),
            span_of(begun, "b", 60, name="too late"),
            span_of(started, "a", 7),
        ]
        stored = await store.add_many_spans(spans)
        assert_same(list(stored), [spans[0], spans[2], spans[3], spans[5]])
        assert await self.found(store, started.rollout_id) == ["known", "b", "a"]
        assert_same((await store.query_spans(other.rollout_id)).items, [spans[3], spans[0]])
        assert await store.get_next_span_sequence_id(started.rollout_id, "any") == 8
        assert await store.get_next_span_sequence_id(other.rollout_id, "any") == 5
        assert list(await store.add_many_spans(spans)) == []
        assert list(await store.add_many_spans([])) == []

    async def test_a_span_of_nothing_is_refused_and_moves_nothing(
        self, store: LightningStore, started: AttemptedRollout
    ) -> None:
        other = await store.start_rollout(2)
        queued = await store.enqueue_rollout(3)
        before = await contents(store, started.rollout_id, other.rollout_id)
        for rollout_id, attempt_id in (
            ("ro-000000000000", "at-00000000"),
            (started.rollout_id, "at-00000000"),
            (started.rollout_id, other.attempt.attempt_id),
            (started.rollout_id, "latest"),
            (queued.rollout_id, "latest"),
        ):
            lost = make_span(rollout_id, attempt_id, "lost", 100)
            with pytest.raises(RecordNotFoundError):
                await store.add_span(lost)
            with pytest.raises(RecordNotFoundError):
                await store.add_otel_span(rollout_id, attempt_id, sdk_span(1))
            with pytest.raises(RecordNotFoundError):
                await store.add_otel_span(rollout_id, attempt_id, sdk_span(1), 100)
        assert await contents(store, started.rollout_id, other.rollout_id) == before
        assert await store.get_next_span_sequence_id("ro-000000000000", "any") == 1
        assert await store.get_next_span_sequence_id(queued.rollout_id, "any") == 1

    # Numbers

    async def test_numbers_count_per_rollout(self, store: LightningStore, started: AttemptedRollout) -> None:
        other = await store.start_rollout(2)
        mine = [await store.get_next_span_sequence_id(started.rollout_id, name) for name in ("a", "b", "a")]
        assert mine == [1, 2, 3]
        assert await store.get_next_span_sequence_id(other.rollout_id, "a") == 1
        assert await store.get_next_span_sequence_id("never heard of", "a") == 1
        pairs = [
            (started.rollout_id, "x"),
            (other.rollout_id, "x"),
            (started.rollout_id, "y"),
            ("never heard of", "z"),
        ]
        assert list(await store.get_many_span_sequence_ids(pairs)) == [4, 2, 5, 2]
        assert list(await store.get_many_span_sequence_ids([])) == []
        assert (await store.query_rollouts()).total == 2

    async def test_a_span_pushes_the_counter_up_and_never_down(
        self, store: LightningStore, started: AttemptedRollout
    ) -> None:
        for span_id, sequence_id, following in (
            ("a", 10, 11),
            ("b", 3, 12),
            ("c", -7, 13),
            ("d", 0, 14),
            ("e", 14, 15),
            ("f", 2**62 - 10, 2**62 - 9),
        ):
            await store.add_span(span_of(started, span_id, sequence_id))
            assert await store.get_next_span_sequence_id(started.rollout_id, "any") == following

    async def test_concurrent_numbers_are_all_different(self, store: LightningStore, started: AttemptedRollout) -> None:
        async def number(index: int) -> list[int]:
            if index % 3:
                return [await store.get_next_span_sequence_id(started.rollout_id, "any")]
            return list(await store.get_many_span_sequence_ids([(started.rollout_id, "any")] * 3))

        issued = [number for batch in await asyncio.gather(*(number(index) for index in range(30))) for number in batch]
        assert sorted(issued) == list(range(1, 51))

    async def test_sdk_spans(self, store: LightningStore, started: AttemptedRollout) -> None:
        event = SimpleNamespace(name="e", attributes={"k": 1}, timestamp=2_000_000_000)
        readable = sdk_span(
            0xF1, attributes={"a": (1, 2), "raw": b"\x01\xff", "none": None}, parent=0xF0, events=[event], links=[0xF9]
        )
        key = (started.rollout_id, started.attempt.attempt_id)
        await store.get_next_span_sequence_id(*key)
        context: dict[str, Any] = {"trace_id": f"{0xABC:032x}", "is_remote": False, "trace_state": {"vendor": "state"}}
        expected = Span(
            rollout_id=key[0],
            attempt_id=key[1],
            sequence_id=2,
            trace_id=f"{0xABC:032x}",
            span_id=f"{0xF1:016x}",
            parent_id=f"{0xF0:016x}",
            name="work",
            status=TraceStatus(status_code="ERROR", description="broken"),
            attributes={"a": [1, 2], "raw": "01ff"},
            events=[Event(name="e", attributes={"k": 1}, timestamp=2.0)],
            links=[Link(context=SpanContext(span_id=f"{0xF9:016x}", **context))],
            start_time=1.5,
            end_time=2.5,
            context=SpanContext(span_id=f"{0xF1:016x}", **context),
            parent=SpanContext(span_id=f"{0xF0:016x}", **context),
            resource=OtelResource(attributes={"service.name": "agent"}, schema_url="https://schema.example/1"),
        )
        assert_same(await store.add_otel_span(*key, readable), expected)
        assert_same((await store.query_spans(key[0])).items, [expected])
        assert await store.add_otel_span(*key, readable, 77) is None
        numbered = await store.add_otel_span(*key, sdk_span(0xF2), 40)
        assert numbered is not None
        assert (numbered.sequence_id, numbered.parent_id, numbered.parent, numbered.attributes) == (40, None, None, {})
        assert await store.get_next_span_sequence_id(*key) == 41

    async def test_an_import_sorts_spans_out(self, store: LightningStore, started: AttemptedRollout) -> None:
        other = await store.start_rollout(2)
        await store.add_span(span_of(started, "known", 3))
        spans = [
            span_of(started, "a", 0),
            make_span("ro-000000000000", "at-00000000", "lost", 0),
            span_of(started, "known", 0),
            span_of(other, "b", 9),
            span_of(started, "c", 0),
            span_of(started, "a", 0),
            make_span(started.rollout_id, other.attempt.attempt_id, "lost", 5),
        ]
        receipt = await store.import_spans(spans, unnumbered={0, 1, 2, 4, 5})
        expected = [
            spans[0].model_copy(update={"sequence_id": 4}),
            spans[3],
            spans[4].model_copy(update={"sequence_id": 5}),
        ]
        assert_same(list(receipt.stored), expected)
        assert receipt.duplicates == 2
        assert [span.span_id for span in receipt.rejected] == ["lost", "lost"]
        assert await self.found(store, started.rollout_id) == ["known", "a", "c"]
        assert (await attempt_of(store, other.rollout_id)).status == "running"
        assert await store.get_next_span_sequence_id(started.rollout_id, "any") == 6
        empty = await store.import_spans([])
        assert (list(empty.stored), empty.duplicates, list(empty.rejected)) == ([], 0, [])

    # Heartbeats

    @pytest.mark.parametrize(
        ("before", "after", "rollout"),
        [
            ("preparing", "running", "running"),
            ("running", "running", "running"),
            ("unresponsive", "running", "running"),
            ("timeout", "timeout", "requeuing"),
            ("failed", "failed", "requeuing"),
            ("succeeded", "succeeded", "succeeded"),
        ],
    )
    async def test_a_span_is_a_sign_of_life(
        self, store: LightningStore, advance: Advance, before: Any, after: str, rollout: str
    ) -> None:
        started = await store.start_rollout(1, config=retrying(), worker_id="w")
        attempt = await store.update_attempt(started.rollout_id, "latest", status=before)
        worker = await worker_of(store, "w")
        await advance(0.005)
        await store.add_span(span_of(started, "a"))
        beaten = await attempt_of(store, started.rollout_id)
        assert beaten.last_heartbeat_time is not None
        assert beaten.last_heartbeat_time > started.start_time
        assert_same(
            beaten,
            attempt.model_copy(update={"status": after, "last_heartbeat_time": beaten.last_heartbeat_time}),
        )
        assert (await rollout_of(store, started.rollout_id)).status == rollout
        assert_same(await worker_of(store, "w"), worker)
        assert len(await drain(store)) == (rollout == "requeuing")

    async def test_a_duplicate_is_no_sign_of_life(self, store: LightningStore, started: AttemptedRollout) -> None:
        await store.add_span(span_of(started, "a"))
        await store.update_attempt(started.rollout_id, "latest", last_heartbeat_time=5.0, status="unresponsive")
        before = await contents(store, started.rollout_id)
        assert await store.add_span(span_of(started, "a")) is None
        assert list(await store.add_many_spans([span_of(started, "a"), span_of(started, "a")])) == []
        assert await contents(store, started.rollout_id) == before
        assert len(await store.add_many_spans([span_of(started, "a"), span_of(started, "b")])) == 1
        assert (await attempt_of(store, started.rollout_id)).status == "running"

    @pytest.mark.parametrize("status", ["queuing", "failed", "succeeded", "cancelled"])
    async def test_a_span_moves_no_rollout_out_of(
        self, store: LightningStore, started: AttemptedRollout, status: Any
    ) -> None:
        await store.update_rollout(started.rollout_id, status=status)
        before = await rollout_of(store, started.rollout_id)
        await store.add_span(span_of(started, "a"))
        after = await rollout_of(store, started.rollout_id)
        assert (after.status, after.end_time) == (before.status, before.end_time)
        assert (await attempt_of(store, started.rollout_id)).status == "running"

    async def test_a_late_span_of_an_older_attempt_moves_only_it(
        self, store: LightningStore, started: AttemptedRollout
    ) -> None:
        begun = await store.start_attempt(started.rollout_id)
        await store.add_span(span_of(started, "late"))
        assert (await attempt_of(store, started.rollout_id, 1)).status == "running"
        assert_same(await store.get_rollout_by_id(started.rollout_id), begun)
        await store.add_many_spans([span_of(started, "later"), span_of(begun, "now")])
        assert (await rollout_of(store, started.rollout_id)).status == "running"
        assert (await attempt_of(store, started.rollout_id, 2)).status == "running"

    # Queries

    async def test_queries_look_in_one_rollout(self, store: LightningStore, started: AttemptedRollout) -> None:
        begun = await store.start_attempt(started.rollout_id)
        other = await store.start_rollout(2)
        for rollout, span_id, number in ((started, "a", 3), (started, "b", 1), (begun, "c", 2), (other, "d", 1)):
            await store.add_span(span_of(rollout, span_id, number))
        assert await self.found(store, started.rollout_id) == ["b", "c", "a"]
        assert await self.found(store, started.rollout_id, started.attempt.attempt_id) == ["b", "a"]
        assert await self.found(store, started.rollout_id, "latest") == ["c"]
        assert await self.found(store, started.rollout_id, "at-00000000") == []
        assert await self.found(store, "ro-000000000000", "latest") == []
        assert await self.found(store, started.rollout_id, sort_order="desc") == ["a", "c", "b"]
        assert await self.found(store, started.rollout_id, started.attempt.attempt_id, sort_by=None) == ["a", "b"]
        assert await self.found(store, started.rollout_id, limit=1, offset=1) == ["c"]
        everything = {"filter_logic": "or"}
        assert await self.found(store, started.rollout_id, **everything) == ["b", "c", "a"]
        assert await self.found(store, started.rollout_id, "latest", **everything) == ["c"]

    async def test_queries_filter(self, store: LightningStore, started: AttemptedRollout) -> None:
        await store.add_many_spans(
            [
                span_of(started, "s1", 1, trace_id="t1", name="alpha", parent_id=None),
                span_of(started, "s2", 2, trace_id="t1", name="Alpha 100%", parent_id="s1"),
                span_of(started, "s3", 3, trace_id="T2", name="beta_x", parent_id="s2"),
            ]
        )
        filters: list[tuple[dict[str, Any], list[str]]] = [
            ({"trace_id": "t1"}, ["s1", "s2"]),
            ({"trace_id": "t"}, []),
            ({"trace_id_contains": "t"}, ["s1", "s2"]),
            ({"span_id": "s3"}, ["s3"]),
            ({"span_id_contains": "s"}, ["s1", "s2", "s3"]),
            ({"parent_id": "s1"}, ["s2"]),
            ({"parent_id_contains": ""}, ["s2", "s3"]),
            ({"name": "alpha"}, ["s1"]),
            ({"name_contains": "lpha"}, ["s1", "s2"]),
            ({"name_contains": "%"}, ["s2"]),
            ({"name_contains": "_"}, ["s3"]),
            ({"name_contains": "missing"}, []),
            ({"trace_id": "t1", "name_contains": "A"}, ["s2"]),
            ({"trace_id": "T2", "name": "alpha"}, []),
            ({"trace_id": "T2", "name": "alpha", "filter_logic": "or"}, ["s1", "s3"]),
            ({"name": "alpha", "name_contains": "beta", "filter_logic": "or"}, ["s1", "s3"]),
            ({"name": "missing", "filter_logic": "or"}, []),
        ]
        for options, expected in filters:
            assert await self.found(store, started.rollout_id, **options) == expected, options
            latest = await self.found(store, started.rollout_id, started.attempt.attempt_id, **options)
            assert latest == expected, options
        begun = await store.start_attempt(started.rollout_id)
        for options, _ in filters:
            assert await self.found(store, started.rollout_id, begun.attempt.attempt_id, **options) == []
            assert await self.found(store, started.rollout_id, "latest", **options) == []

    async def test_queries_sort(self, store: LightningStore, started: AttemptedRollout) -> None:
        await store.add_many_spans(
            [
                span_of(started, "a", 1, start_time=2.0, end_time=None, parent_id="x"),
                span_of(started, "b", 1, start_time=None, end_time=5.0),
                span_of(started, "c", 0, start_time=1.0, end_time=None, parent_id="w"),
                span_of(started, "d", 1, start_time=None, end_time=4.0),
            ]
        )
        for options, expected in [
            ({}, "cabd"),
            ({"sort_order": "desc"}, "abdc"),
            ({"sort_by": None}, "abcd"),
            ({"sort_by": "start_time"}, "cabd"),
            ({"sort_by": "start_time", "sort_order": "desc"}, "bdac"),
            ({"sort_by": "end_time"}, "dbac"),
            ({"sort_by": "end_time", "sort_order": "desc"}, "acbd"),
            ({"sort_by": "parent_id"}, "bdca"),
            ({"sort_by": "parent_id", "sort_order": "desc"}, "acbd"),
            ({"sort_by": "name", "sort_order": "desc"}, "dcba"),
        ]:
            found = await self.found(store, started.rollout_id, **options)
            assert "".join(found) == expected, options
