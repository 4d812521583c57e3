"""The whole store over any `LightningCollections`: every write operation is one `execute`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias, TypeVar

from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.collections.protocols import AtomicLabel, LightningCollections
from lightning_sql.collections.tracking import store_method
from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
from lightning_sql.identifiers import new_resources_id
from lightning_sql.records import (
    ROLLOUT_ACTIVE,
    ROLLOUT_FINISHED,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    IdempotencyKey,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Unset,
    Worker,
    given,
)
from lightning_sql.store.collection_reads import CollectionReads
from lightning_sql.store.interface import (
    SpanReceipt,
    StoreCapabilities,
    refuse_null,
)
from lightning_sql.store.memory_keys import MemoryKeys
from lightning_sql.store.spans import SpanImport
from lightning_sql.store.transaction import (
    LATEST,
    StoreTransaction,
    attempted,
    latest_attempts,
    rollout_or_error,
)
from lightning_sql.store.waiting import FinishWatcher
from lightning_sql.store.watchdog import ScanGate

__all__ = ["CollectionStore"]

R = TypeVar("R")

POLL_SECONDS: Final = 0.1
"""How often the database is asked whether another process finished a rollout that somebody here waits for."""

ROLLOUT_LABELS: Final[tuple[AtomicLabel, ...]] = ("rollouts", "attempts", "workers", "rollout_queue")
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


def _pair_of(rollout: AttemptedRollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


class CollectionStore(CollectionReads):
    """A store that works step by step on collections, each operation in one transaction of theirs.

    Over memory it is the reference; over SQL it proves the collections. Idempotency keys last as long as
    the object.

    Args:
        collections: where everything is kept; closed with the store if it can be.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger; 0 scans before every call.
        clock: seconds of any origin, for the debounce only; records take their times from the collections.
        claim_timeout_seconds: after how long an attempt of which nothing was heard since it was begun is given up
            and its rollout queued again, whatever its retry settings; None is never.
    """

    def __init__(
        self,
        collections: LightningCollections,
        *,
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        claim_timeout_seconds: float | None = None,
    ) -> None:
        self._claim_timeout = claim_timeout_seconds
        super().__init__(collections, ScanGate(self.sweep, scan_debounce_seconds, clock))
        self._watcher = FinishWatcher(self._find_finished, POLL_SECONDS)
        self._keys = MemoryKeys()

    @property
    def collections(self) -> LightningCollections:
        """Where everything is kept."""
        return self._collections

    @override
    async def close(self) -> None:
        await self._watcher.close()
        await self._collections.close()

    @override
    async def release_waiters(self) -> None:
        await self._watcher.close()

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": False, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def _write(
        self, name: str, labels: Sequence[AtomicLabel], callback: Callable[[StoreTransaction], Awaitable[R]]
    ) -> R:
        finished: list[str] = []

        async def run(collections: LightningCollections) -> R:
            transaction = StoreTransaction(collections, await collections.now(), self._claim_timeout)
            result = await callback(transaction)
            finished[:] = transaction.finished
            return result

        token = store_method.set((name, name))
        try:
            result = await self._collections.execute(run, mode="rw", commit=True, labels=labels)
        finally:
            store_method.reset(token)
        self._watcher.announce(finished)
        return result

    # Watchdog

    @override
    async def sweep(self) -> int:
        overdue = await self._read("sweep", self._overdue)
        if not overdue:
            return 0

        async def expire(transaction: StoreTransaction) -> int:
            count = 0
            for rollout, attempt, verdict in await self._overdue(transaction.collections):
                expired = lifecycle.attempt_with_status(attempt, verdict, transaction.now)
                await transaction.save_attempt(expired, latest=True, rollout=rollout, sync_worker=True)
                count += 1
            return count

        return await self._write("sweep", ROLLOUT_LABELS, expire)

    async def _overdue(self, collections: LightningCollections) -> list[tuple[Rollout, Attempt, AttemptStatus]]:
        now = await collections.now()
        active = await collections.rollouts.query({"status": {"within": sorted(ROLLOUT_ACTIVE)}})
        limited = {
            rollout.rollout_id: rollout
            for rollout in active.items
            if lifecycle.is_limited(rollout.config, self._claim_timeout)
        }
        found: list[tuple[Rollout, Attempt, AttemptStatus]] = []
        for rollout_id, attempt in (await latest_attempts(collections, limited)).items():
            verdict = lifecycle.expired_status(limited[rollout_id], attempt, now, self._claim_timeout)
            if verdict is not None:
                found.append((limited[rollout_id], attempt, verdict))
        return found

    # Rollouts

    @override
    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> AttemptedRollout:
        await self._gate.pass_through()
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )

        async def start(transaction: StoreTransaction) -> AttemptedRollout:
            [rollout] = await self._new_rollouts(transaction, [request], "preparing")
            attempt = lifecycle.new_attempt(rollout.rollout_id, 1, worker_id, transaction.now)
            await transaction.collections.attempts.insert([attempt])
            await transaction.sync_worker(attempt)
            return attempted(rollout, attempt)

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("start_rollout", ROLLOUT_LABELS, start),
            _pair_of,
            self._recalled_attempt,
        )

    @override
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        [rollout] = await self.enqueue_many_rollouts([request], idempotency_key=idempotency_key)
        return rollout

    @override
    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Rollout]:
        await self._gate.pass_through()
        if not rollouts:
            return []

        async def enqueue(transaction: StoreTransaction) -> Sequence[Rollout]:
            created = await self._new_rollouts(transaction, rollouts, "queuing")
            await transaction.collections.rollout_queue.enqueue([rollout.rollout_id for rollout in created])
            return created

        async def recall(rollout_ids: list[str]) -> Sequence[Rollout]:
            found = await self._rollouts_by_id(rollout_ids)
            return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("enqueue_many_rollouts", ("rollouts", "rollout_queue"), enqueue),
            lambda created: [rollout.rollout_id for rollout in created],
            recall,
        )

    async def _new_rollouts(
        self, transaction: StoreTransaction, requests: Sequence[EnqueueRolloutRequest], status: RolloutStatus
    ) -> list[Rollout]:
        latest: str | None = None
        if any(request.resources_id is None for request in requests):
            resources = await self._latest_resources(transaction.collections)
            latest = None if resources is None else resources.resources_id
        created = [lifecycle.new_rollout(request, status, latest, transaction.now) for request in requests]
        await transaction.collections.rollouts.insert(created)
        return created

    @override
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id, idempotency_key=idempotency_key)
        return claimed[0] if claimed else None

    @override
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[AttemptedRollout]:
        await self._gate.pass_through()
        if limit <= 0:
            return []

        async def claim(transaction: StoreTransaction) -> Sequence[AttemptedRollout]:
            rollouts = await transaction.take_from_queue(limit)
            claimed = await transaction.begin_attempts(rollouts, worker_id) if rollouts else []
            if worker_id:
                worker = await transaction.worker(worker_id)
                worker = (
                    lifecycle.worker_after_claim(worker, claimed[-1].attempt, transaction.now)
                    if claimed
                    else lifecycle.worker_after_empty_dequeue(worker, transaction.now)
                )
                await transaction.collections.workers.upsert([worker])
            return claimed

        async def recall(pairs: list[tuple[str, str]]) -> Sequence[AttemptedRollout]:
            return [await self._recalled_attempt(pair) for pair in pairs]

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("dequeue_many_rollouts", ROLLOUT_LABELS, claim),
            lambda claimed: [_pair_of(rollout) for rollout in claimed],
            recall,
        )

    async def _recalled_attempt(self, pair: tuple[str, str]) -> AttemptedRollout:
        """A rollout as it is now, with one of its attempts."""

        async def query(collections: LightningCollections) -> AttemptedRollout:
            rollout = await rollout_or_error(collections, pair[0])
            attempt = await collections.attempts.get(
                {"rollout_id": {"exact": pair[0]}, "attempt_id": {"exact": pair[1]}}
            )
            if attempt is None:
                raise RecordNotFoundError(f"there is no attempt {pair[1]!r:.200} of rollout {pair[0]!r:.200}")
            return attempted(rollout, attempt)

        return await self._read("get_rollout_by_id", query)

    @override
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout:
        await self._gate.pass_through()

        async def start(transaction: StoreTransaction) -> AttemptedRollout:
            rollout = await rollout_or_error(transaction.collections, rollout_id)
            [begun] = await transaction.begin_attempts([rollout], worker_id)
            await transaction.sync_worker(begun.attempt)
            return begun

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("start_attempt", ROLLOUT_LABELS, start),
            _pair_of,
            self._recalled_attempt,
        )

    @override
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        await self._gate.pass_through()
        known = await self._rollouts_by_id(rollout_ids)
        pending = {rollout.rollout_id for rollout in known.values() if not lifecycle.is_finished(rollout.status)}
        if pending and (timeout is None or timeout > 0):
            await self._watcher.wait(pending, timeout)
            known = await self._rollouts_by_id(rollout_ids)
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

    @override
    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: RolloutMode | None | Unset = UNSET,
        resources_id: str | None | Unset = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        changes = given(
            {
                "input": input,
                "mode": mode,
                "resources_id": resources_id,
                "status": status,
                "config": config,
                "metadata": metadata,
            }
        )
        refuse_null(changes, ("status", "config"))
        await self._gate.pass_through()

        async def update(transaction: StoreTransaction) -> Rollout:
            before = await rollout_or_error(transaction.collections, rollout_id)
            if not changes:
                return before
            # Validated as a whole: what a caller gives in Python is no safer than what comes over the wire.
            after = Rollout.model_validate(dict(before) | changes)
            if "status" in changes:
                after = lifecycle.rollout_with_status(after, after.status, transaction.now)
            fields = [*changes, "end_time"] if "status" in changes else list(changes)
            await transaction.save_rollouts([(before, after)], fields)
            return after

        async def recall(rollout_id: str) -> Rollout:
            return (await self._rollouts_by_id([rollout_id]))[rollout_id]

        return await self._keys.once(
            idempotency_key,
            lambda: self._write("update_rollout", ("rollouts", "rollout_queue"), update),
            lambda rollout: rollout.rollout_id,
            recall,
        )

    # Attempts

    @override
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        changes = given(
            {
                "status": status,
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": metadata,
            }
        )
        refuse_null(changes, changes)
        await self._gate.pass_through()

        async def update(transaction: StoreTransaction) -> Attempt:
            rollout = await rollout_or_error(transaction.collections, rollout_id)
            latest = (await latest_attempts(transaction.collections, [rollout_id])).get(rollout_id)
            before = latest
            if attempt_id != LATEST and (latest is None or latest.attempt_id != attempt_id):
                before = await transaction.collections.attempts.get(
                    {"rollout_id": {"exact": rollout_id}, "attempt_id": {"exact": attempt_id}}
                )
            if before is None or latest is None:
                raise RecordNotFoundError(f"there is no attempt {attempt_id!r:.200} of rollout {rollout_id!r:.200}")
            after = Attempt.model_validate(dict(before) | changes)
            if "status" in changes:
                after = lifecycle.attempt_with_status(after, after.status, transaction.now)
            if self._claim_timeout is not None:
                after = lifecycle.attempt_heard_of(after, transaction.now)
            await transaction.save_attempt(
                after,
                latest=after.attempt_id == latest.attempt_id,
                rollout=rollout,
                sync_worker=lifecycle.worker_follows(changes),
            )
            return after

        return await self._write("update_attempt", ROLLOUT_LABELS, update)

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
            return await work.store()

        return await self._write(name, SPAN_LABELS, store)

    @override
    async def import_spans(
        self,
        spans: Sequence[Span],
        *,
        unnumbered: AbstractSet[int] = frozenset(),
        idempotency_key: IdempotencyKey | None = None,
    ) -> SpanReceipt:
        if unnumbered and idempotency_key is not None:
            raise InvalidRequestError("spans without a number cannot be stored under an idempotency key")
        if not spans:
            return SpanReceipt(stored=[], duplicates=0, rejected=[])

        async def store(transaction: StoreTransaction) -> SpanReceipt:
            work = await SpanImport.prepare(transaction, spans, unnumbered)
            return SpanReceipt(stored=await work.store(), duplicates=work.duplicates, rejected=work.rejected)

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
