"""The whole store over any `LightningCollections`: every write operation is one `execute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.collections.protocols import AtomicLabel, LightningCollections
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.metrics import CLAIMS, ENQUEUED, RETRIES
from lightning_sql.records import (
    ROLLOUT_ACTIVE,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    IdempotencyKey,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Unset,
    given,
)
from lightning_sql.store.collection_writes import CollectionWrites
from lightning_sql.store.interface import (
    refuse_null,
)
from lightning_sql.store.measured import measured
from lightning_sql.store.transaction import (
    LATEST,
    StoreTransaction,
    attempted,
    latest_attempts,
    rollout_or_error,
)

__all__ = ["CollectionStore"]

ROLLOUT_LABELS: Final[tuple[AtomicLabel, ...]] = ("rollouts", "attempts", "workers", "rollout_queue")


def _pair_of(rollout: AttemptedRollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


@measured
class CollectionStore(CollectionWrites):
    """A store that works step by step on collections, each operation in one transaction of theirs.

    Over memory it is the reference; over SQL it proves the collections. Idempotency keys last as long as
    the object.

    Args:
        collections: where everything is kept; closed with the store if it can be.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger; 0 scans before every call.
        clock: seconds of any origin, for the debounce only; records take their times from the collections.
        claim_timeout_seconds: after how long an attempt of which nothing was heard since it was begun is given up
            and its rollout queued again, whatever its retry settings; None is never.
        recorder: who takes down what it does; None is nobody.
    """

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
            transaction.counts[ENQUEUED] += len(created)
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
        self, worker_id: str | None = None, *, wait: float = 0.0, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(worker_id=worker_id, wait=wait, idempotency_key=idempotency_key)
        return claimed[0] if claimed else None

    @override
    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float = 0.0,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Sequence[AttemptedRollout]:
        if wait > 0 and limit > 0:

            async def attempt() -> Sequence[AttemptedRollout]:
                return await self.dequeue_many_rollouts(
                    limit=limit, worker_id=worker_id, idempotency_key=idempotency_key
                )

            return await self._queue.claim(attempt, wait)
        await self._gate.pass_through()
        if limit <= 0:
            return []

        async def claim(transaction: StoreTransaction) -> Sequence[AttemptedRollout]:
            rollouts = await transaction.take_from_queue(limit)
            claimed = await transaction.begin_attempts(rollouts, worker_id) if rollouts else []
            transaction.counts[CLAIMS] += len(claimed)
            transaction.counts[RETRIES] += sum(rollout.attempt.sequence_id > 1 for rollout in claimed)
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
