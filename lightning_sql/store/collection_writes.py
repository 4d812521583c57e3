"""What every store over collections shares, and its writes of spans, resources and workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias, TypeVar

from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.collections.protocols import AtomicLabel, LightningCollections
from lightning_sql.collections.tracking import store_method
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.identifiers import new_resources_id
from lightning_sql.metrics import ENQUEUED, SPANS, Metric, Recorder
from lightning_sql.records import (
    ROLLOUT_FINISHED,
    UNSET,
    IdempotencyKey,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    Span,
    Unset,
    Worker,
)
from lightning_sql.store.collection_reads import CollectionReads
from lightning_sql.store.interface import SpanReceipt, StoreCapabilities, check_import
from lightning_sql.store.measured import record_finished, record_lag
from lightning_sql.store.memory_keys import MemoryKeys
from lightning_sql.store.spans import SpanImport
from lightning_sql.store.transaction import StoreTransaction
from lightning_sql.store.waiting import QUEUE_POLL_SECONDS, FinishWatcher, QueueWatcher
from lightning_sql.store.watchdog import ScanGate

__all__ = ["CollectionWrites"]

R = TypeVar("R")

POLL_SECONDS: Final = 0.1
"""How often the database is asked whether another process finished a rollout that somebody here waits for."""

SPAN_LABELS: Final[tuple[AtomicLabel, ...]] = (
    "rollouts",
    "attempts",
    "spans",
    "rollout_queue",
    "span_sequence_ids",
)


_SpanKey: TypeAlias = tuple[str, str, str]


def _span_key(span: Span) -> _SpanKey:
    return span.rollout_id, span.attempt_id, span.span_id


class CollectionWrites(CollectionReads):
    """The half of `CollectionStore` that knows nothing of the queue, and waits for what is finished."""

    def __init__(
        self,
        collections: LightningCollections,
        *,
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        claim_timeout_seconds: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder
        self._claim_timeout = claim_timeout_seconds
        super().__init__(collections, ScanGate(self.sweep, scan_debounce_seconds, clock))
        self._watcher = FinishWatcher(self._find_finished, POLL_SECONDS)
        self._queue = QueueWatcher(self._look_into_queue, QUEUE_POLL_SECONDS)
        self._keys = MemoryKeys()

    @property
    def collections(self) -> LightningCollections:
        """Where everything is kept."""
        return self._collections

    @override
    async def close(self) -> None:
        await self.release_waiters()
        await self._collections.close()

    @override
    async def release_waiters(self) -> None:
        await self._watcher.close()
        await self._queue.close()

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": False, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def _write(
        self, name: str, labels: Sequence[AtomicLabel], callback: Callable[[StoreTransaction], Awaitable[R]]
    ) -> R:
        finished: list[Rollout] = []
        counts: Counter[Metric] = Counter()

        async def run(collections: LightningCollections) -> R:
            transaction = StoreTransaction(collections, await collections.now(), self._claim_timeout)
            result = await callback(transaction)
            finished[:] = transaction.finished
            counts.clear()
            counts.update(transaction.counts)
            return result

        token = store_method.set((name, name))
        try:
            result = await self._collections.execute(run, mode="rw", commit=True, labels=labels)
        finally:
            store_method.reset(token)
        self._watcher.announce(rollout.rollout_id for rollout in finished)
        self._queue.announce(counts[ENQUEUED])
        if self.recorder is not None:
            record_finished(self.recorder, finished)
            for metric, amount in counts.items():
                self.recorder.count(metric, amount=amount)
        return result

    # Waits

    @override
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        await self._gate.pass_through()
        known = await self._rollouts_by_id(rollout_ids)
        pending = {rollout.rollout_id for rollout in known.values() if not lifecycle.is_finished(rollout.status)}
        if pending and (timeout is None or timeout > 0):
            await self._watcher.wait(pending, timeout)
            known = await self._rollouts_by_id(rollout_ids)
            if self.recorder is not None:
                ends = [known[id_].end_time for id_ in pending if id_ in known]
                record_lag(self.recorder, len(pending), ends, time.time())
        finished = {id_ for id_, rollout in known.items() if lifecycle.is_finished(rollout.status)}
        return [known[rollout_id] for rollout_id in rollout_ids if rollout_id in finished]

    async def _rollouts_by_id(self, rollout_ids: Collection[str]) -> dict[str, Rollout]:
        async def query(collections: LightningCollections) -> dict[str, Rollout]:
            page = await collections.rollouts.query({"rollout_id": {"within": list(dict.fromkeys(rollout_ids))}})
            return {rollout.rollout_id: rollout for rollout in page.items}

        return await self._read("wait_for_rollouts", query)

    async def _find_finished(self, rollout_ids: Collection[str]) -> Iterable[str]:
        await self._gate.pass_through()

        async def query(collections: LightningCollections) -> Iterable[str]:
            page = await collections.rollouts.query(
                {"rollout_id": {"within": rollout_ids}, "status": {"within": sorted(ROLLOUT_FINISHED)}}
            )
            return [rollout.rollout_id for rollout in page.items]

        return await self._read("wait_for_rollouts", query)

    async def _look_into_queue(self, most: int) -> int:  # noqa: ARG002 - it costs nothing to count them all
        await self._gate.pass_through()

        async def query(collections: LightningCollections) -> int:
            return await collections.rollout_queue.size()

        return await self._read("dequeue_many_rollouts", query)

    # Spans

    @override
    async def add_span(self, span: Span) -> Span | None:
        stored = await self._store_spans("add_span", [span])
        return stored[0] if stored else None

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        return await self._store_spans("add_many_spans", spans)

    async def _store_spans(self, name: str, spans: Sequence[Span]) -> Sequence[Span]:
        if not spans:
            return []

        async def store(transaction: StoreTransaction) -> Sequence[Span]:
            work = await SpanImport.prepare(transaction, spans)
            if work.rejected:
                missing = work.rejected[0]
                raise RecordNotFoundError(
                    f"there is no attempt {missing.attempt_id!r:.200} of a rollout {missing.rollout_id!r:.200}"
                )
            return await self._stored(transaction, work)

        return await self._write(name, SPAN_LABELS, store)

    @staticmethod
    async def _stored(transaction: StoreTransaction, work: SpanImport) -> Sequence[Span]:
        stored = await work.store()
        transaction.counts[SPANS] += len(stored)
        return stored

    @override
    async def import_spans(
        self,
        spans: Sequence[Span],
        *,
        unnumbered: AbstractSet[int] = frozenset(),
        idempotency_key: IdempotencyKey | None = None,
    ) -> SpanReceipt:
        check_import(unnumbered, idempotency_key)
        if not spans:
            return SpanReceipt(stored=[], duplicates=0, rejected=[])

        async def store(transaction: StoreTransaction) -> SpanReceipt:
            work = await SpanImport.prepare(transaction, spans, unnumbered)
            stored = await self._stored(transaction, work)
            return SpanReceipt(stored, duplicates=work.duplicates, rejected=work.rejected)

        async def recall(keys: tuple[set[_SpanKey], set[_SpanKey]]) -> SpanReceipt:
            first: dict[_SpanKey, Span] = {}
            for span in spans:
                first.setdefault(_span_key(span), span)
            stored = [span for key, span in first.items() if key in keys[0]]
            rejected = [span for span in spans if _span_key(span) in keys[1]]
            return SpanReceipt(stored, len(spans) - len(stored) - len(rejected), rejected)

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("import_spans", SPAN_LABELS, store),
            lambda receipt: (set(map(_span_key, receipt.stored)), set(map(_span_key, receipt.rejected))),
            recall,
        )

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        [number] = await self.get_many_span_sequence_ids([(rollout_id, attempt_id)])
        return number

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not rollout_attempt_ids:
            return []

        async def issue(transaction: StoreTransaction) -> Sequence[int]:
            return await transaction.issue_span_numbers([rollout_id for rollout_id, _ in rollout_attempt_ids])

        return await self._write("get_many_span_sequence_ids", ("span_sequence_ids",), issue)

    # Resources

    @override
    async def add_resources(
        self, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        return await self._write_resources("add_resources", new_resources_id(), resources, idempotency_key)

    @override
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        await self._gate.pass_through()
        return await self._write_resources("update_resources", resources_id, resources, idempotency_key)

    async def _write_resources(
        self, name: str, resources_id: str, resources: NamedResources, key: IdempotencyKey | None
    ) -> ResourcesUpdate:
        async def write(transaction: StoreTransaction) -> ResourcesUpdate:
            collections = transaction.collections
            latest = await self._latest_resources(collections)
            current = await collections.resources.get({"resources_id": {"exact": resources_id}})
            written = (
                lifecycle.new_resources(resources_id, resources, transaction.now, latest)
                if current is None
                else lifecycle.next_resources(current, resources, transaction.now, latest)
            )
            await collections.resources.upsert([written])
            return written

        async def recall(resources_id: str) -> ResourcesUpdate:
            written = await self.get_resources_by_id(resources_id)
            if written is None:
                raise RecordNotFoundError("the resources that this key's call wrote are gone")
            return written

        return await self._keys.once(
            key,
            lambda: self._write(name, ("resources",), write),
            lambda written: written.resources_id,
            recall,
        )

    # Workers

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        if heartbeat_stats is None:  # pyright: ignore[reportUnnecessaryComparison] - callers need not be typed
            raise TypeError("heartbeat_stats cannot be null")
        stats = None if heartbeat_stats is UNSET else heartbeat_stats

        async def beat(transaction: StoreTransaction) -> Worker:
            worker = await transaction.worker(worker_id)
            beaten = lifecycle.worker_after_heartbeat(worker, transaction.now, stats)
            await transaction.collections.workers.upsert([beaten])
            return beaten

        return await self._write("update_worker", ("workers",), beat)
