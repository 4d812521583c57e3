"""The native store: the database does the work, one statement an operation, concurrent calls joined."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast, get_args

from pydantic import BaseModel, TypeAdapter
from sqlalchemy import select
from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    Claim,
    KeyNote,
    RolloutDraft,
    Row,
    WorkerBeat,
)
from lightning_sql.database.engine import Database
from lightning_sql.database.native import ROLLOUT_COLUMNS, ROLLOUTS
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.identifiers import new_attempt_id
from lightning_sql.jsonable import copied
from lightning_sql.loops import PerLoop
from lightning_sql.metrics import Recorder
from lightning_sql.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    IdempotencyKey,
    Identifier,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Seconds,
    Unset,
    Worker,
    given,
    is_plain_identifier,
)
from lightning_sql.store.idempotency import forget_old_keys, note_of, once
from lightning_sql.store.interface import StoreCapabilities, refuse_null
from lightning_sql.store.measured import measured, record_finished, record_outcome
from lightning_sql.store.rows import (
    attempt_of,
    attempted_of,
    plain_request,
    rollout_draft,
    rollout_of,
    stored_payload,
    stored_text,
    worker_of,
)
from lightning_sql.store.sql_lanes import Lanes, RolloutBatch
from lightning_sql.store.sql_loop import OfLoop
from lightning_sql.store.sql_spans import SqlSpans
from lightning_sql.store.sql_writes import NativeTransaction
from lightning_sql.store.transaction import LATEST
from lightning_sql.store.waiting import QUEUE_POLL_SECONDS, FinishWatcher, QueueWatcher

__all__ = ["SqlStore"]

logger: Final = logging.getLogger(__name__)

R = TypeVar("R")

POLL_SECONDS: Final = 0.1
"""How often the database is asked whether another process finished a rollout that somebody here waits for."""
FORGET_SECONDS: Final = 60.0
"""How often idempotency keys that are old enough are removed."""
CLAIM_AT_ONCE: Final = 1000
"""A claim of more rollouts than this first asks how many there are."""
MOST_QUEUED: Final = 2**62
"""More than any queue holds, and a number that a statement can carry."""

_WIDTH: Final = len(ROLLOUT_COLUMNS)
_IDENTIFIER: Final[TypeAdapter[str]] = TypeAdapter(Identifier)
_ATTEMPT_STATUSES: Final = get_args(AttemptStatus)


class _AttemptFields(BaseModel):
    status: AttemptStatus | None = None
    worker_id: Identifier | None = None
    last_heartbeat_time: Seconds | None = None
    metadata: dict[str, Any] | None = None


@measured
class SqlStore(SqlSpans):
    """The store on its own tables in a database.

    Args:
        database: the database, its schema up to date; closed with the store.
        partition: one training run, or one tenant.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger; 0 scans before every call.
        clock: seconds since the epoch, for tests; by default the time is the database's.
        join: whether concurrent calls of one kind go to the database together.
        claim_timeout_seconds: after how long an attempt of which nothing was heard since it was begun is given up
            and its rollout queued again, whatever its retry settings; None is never.
        recorder: who takes down what it does; None is nobody.
    """

    def __init__(
        self,
        database: Database,
        *,
        partition: str = "default",
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] | None = None,
        join: bool = True,
        claim_timeout_seconds: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(database.dialect, partition)
        self.recorder = recorder
        self._database = database
        self._scan_debounce_seconds = scan_debounce_seconds
        self._clock = clock
        self._join = join
        self._claim_timeout = claim_timeout_seconds
        self._loops = PerLoop(self._made_here)
        self._forgot = time.monotonic()
        self._latest: tuple[asyncio.AbstractEventLoop, OfLoop] | None = None

    def __repr__(self) -> str:
        return f"<SqlStore of {self._partition!r} in {self._database!r}>"

    @property
    def _here(self) -> OfLoop:
        loop = asyncio.get_running_loop()
        if self._latest is not None and self._latest[0] is loop:
            return self._latest[1]
        here = self._loops.here()
        self._latest = loop, here
        return here

    def _made_here(self) -> OfLoop:
        self._database.close_first(self._close_here)
        return OfLoop(
            Lanes(
                self._database,
                self._partition,
                self._clock,
                join=self._join,
                claim_timeout=self._claim_timeout,
                recorder=self.recorder,
            ),
            FinishWatcher(self._find_finished, POLL_SECONDS),
            QueueWatcher(self._look_into_queue, QUEUE_POLL_SECONDS),
            sweep=self.sweep,
            maintain=self.maintain,
            debounce_seconds=self._scan_debounce_seconds,
            clock=self._clock or time.monotonic,
        )

    @property
    @override
    def _lanes(self) -> Lanes:
        return self._here.lanes

    @property
    @override
    def _watcher(self) -> FinishWatcher:
        return self._here.watcher

    @override
    async def _pass_gate(self) -> None:
        await self._through_gate()

    async def _through_gate(self) -> OfLoop:
        here = self._here
        if here.gate.due:
            await here.gate.pass_through()
        return here

    @override
    async def close(self) -> None:
        await self._close_here()
        await self._database.close()

    async def _close_here(self) -> None:
        here = self._loops.get()
        if here is None:
            return
        if here.closing is None:
            here.closing = asyncio.create_task(self._close_loop(here), name="lightning-sql close")
        # To its end even if the caller goes: what is half closed is of no use to anybody.
        await asyncio.shield(here.closing)

    async def _close_loop(self, here: OfLoop) -> None:
        try:
            await here.close()
        finally:
            await self._loops.forget()
            self._latest = None

    @override
    async def release_waiters(self) -> None:
        self._database.stop_waiting()
        await self._here.release_waiters()

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    @override
    async def maintain(self) -> None:
        for name in await self._lanes.refresh_statistics():
            logger.debug("the database looked at %s, which has grown", name)
        if time.monotonic() - self._forgot >= FORGET_SECONDS:
            self._forgot = time.monotonic()
            await forget_old_keys(self._lanes)

    # Watchdog

    @override
    async def sweep(self) -> int:
        here = self._here
        ended = 0
        while await self._anything_due(here.lanes):
            # Whoever calls is not held up by this where the database is away, and the next scan is due soon.
            swept = await here.lanes.write(NativeTransaction.sweep, patient=False)
            ended += swept.ended
            self._finished(swept.finished)
            if not swept.more:
                break
        return ended

    async def _anything_due(self, lanes: Lanes) -> bool:
        clock = lanes.hot.clock()
        now = lanes.now()
        instant: Any = now if now is not None else time.time() if clock is None else clock
        # The first is looked at, and only then the clock: a volatile function is no bound of an index, so that all
        # that is watched would be read to find that nothing is due.
        first = (
            select(ROLLOUTS.c.watch_at)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.watch_at.is_not(None))
            .order_by(ROLLOUTS.c.watch_at)
            .limit(1)
            .subquery()
        )
        return bool(await lanes.fetch(select(first.c.watch_at).where(first.c.watch_at <= instant), patient=False))

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
        await self._pass_gate()
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        note = note_of(idempotency_key)
        return await self._once(
            note, lambda transaction: transaction.start_rollout(request, worker_id, note), self._recalled_attempt
        )

    @override
    async def enqueue_rows(
        self, drafts: Sequence[RolloutDraft], idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Row]:
        here = await self._through_gate()
        lanes = here.lanes
        if not drafts:
            return []
        if idempotency_key is None:
            queued = await lanes.enqueue(RolloutBatch(drafts, None))
            here.queue.announce(len(queued))
            return queued
        note = note_of(idempotency_key)

        async def recall(ids: list[str]) -> Sequence[Row]:
            found = {row[0]: row[:_WIDTH] for row in await lanes.rollouts(ids)}
            return [found[rollout_id] for rollout_id in ids if rollout_id in found]

        queued = await once(lanes, note, lambda: lanes.enqueue(RolloutBatch(drafts, note)), recall)
        here.queue.announce(len(queued))
        return queued

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
        request = plain_request(input, mode, resources_id, config, metadata)
        [row] = await self.enqueue_rows([rollout_draft(request)], idempotency_key)
        return rollout_of(row)

    @override
    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Rollout]:
        rows = await self.enqueue_rows([rollout_draft(request) for request in rollouts], idempotency_key)
        return [rollout_of(row) for row in rows]

    @override
    async def claim_rows(
        self, limit: int, worker_id: str | None, idempotency_key: IdempotencyKey | None = None, *, wait: float = 0.0
    ) -> Sequence[Row]:
        if wait > 0:
            return await self._here.queue.claim(lambda: self.claim_rows(limit, worker_id, idempotency_key), wait)
        lanes = (await self._through_gate()).lanes
        if limit > CLAIM_AT_ONCE:
            limit = await self._queued(min(limit, MOST_QUEUED))
        if idempotency_key is not None:
            limit = max(limit, 1)  # it may have found something when it was made first
        elif limit <= 0 and not worker_id:
            return []
        attempt_ids = [new_attempt_id() for _ in range(limit)]
        if idempotency_key is None:
            return await lanes.claim(Claim(stored_text(worker_id), attempt_ids))
        note = note_of(idempotency_key)
        claim = Claim(stored_text(worker_id), attempt_ids, note)
        return await once(lanes, note, lambda: lanes.claim(claim), lanes.attempts_of)

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
        if limit <= 0:
            await self._pass_gate()
            return []
        if worker_id is not None and not is_plain_identifier(worker_id):
            _IDENTIFIER.validate_python(worker_id)
        rows = await self.claim_rows(limit, worker_id, idempotency_key, wait=wait)
        return [attempted_of(row, attempt_of(row[_WIDTH:])) for row in rows]

    @override
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout:
        await self._pass_gate()
        note = note_of(idempotency_key)
        return await self._once(
            note, lambda transaction: transaction.start_attempt(rollout_id, worker_id, note), self._recalled_attempt
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
        await self._pass_gate()
        note = note_of(idempotency_key)

        async def recall(ids: list[str]) -> Rollout:
            [row] = await self._lanes.rollouts(ids)
            return rollout_of(row)

        finished: list[Rollout] = []

        def update(transaction: NativeTransaction) -> Rollout:
            updated = transaction.update_rollout(rollout_id, changes, note)
            finished[:] = transaction.finished
            return updated

        rollout = await self._once(note, update, recall)
        self._finished(finished)
        return rollout

    def _finished(self, rollouts: Sequence[Rollout]) -> None:
        """Tell of rollouts that got an outcome."""
        self._watcher.announce(rollout.rollout_id for rollout in rollouts)
        record_finished(self.recorder, rollouts)

    async def _once(
        self,
        note: KeyNote | None,
        work: Callable[[NativeTransaction], R],
        recall: Callable[[list[Any]], Awaitable[R]],
    ) -> R:
        """Run a transaction that writes down its note, or answer from the note of an earlier one."""
        lanes = self._lanes
        return await once(lanes, note, lambda: lanes.write(work), recall)

    async def _recalled_attempt(self, pairs: list[tuple[str, str]]) -> AttemptedRollout:
        [row] = await self._lanes.attempts_of(pairs)
        return attempted_of(row, attempt_of(row[_WIDTH:]))

    # Attempts

    @override
    async def update_attempt_row(self, change: AttemptChange) -> Row:
        here = await self._through_gate()
        changed = await here.lanes.attempts(change)
        if changed is None:
            attempt_id = LATEST if change.attempt_id is None else decode_text(change.attempt_id)
            rollout_id = decode_text(change.rollout_id)
            raise RecordNotFoundError(f"there is no attempt {attempt_id!r:.200} of a rollout {rollout_id!r:.200}")
        if lifecycle.is_finished(changed.rollout_status):
            here.watcher.announce([decode_text(change.rollout_id)])
        if self.recorder is not None and changed.lasted is not None:
            record_outcome(self.recorder, changed.rollout_status, changed.mode, changed.lasted)
        return changed.attempt

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
        key = encode_text(rollout_id), None if attempt_id == LATEST else encode_text(attempt_id)
        if worker_id is last_heartbeat_time is metadata is UNSET and status in _ATTEMPT_STATUSES:
            # The usual end of an attempt, in which nothing is left to be checked.
            plain = AttemptChange(*key, cast(AttemptStatus, status), None, None, None)
            return attempt_of(await self.update_attempt_row(plain))
        changes = given(
            {
                "status": status,
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": metadata,
            }
        )
        refuse_null(changes, changes)
        fields = _AttemptFields.model_validate(changes)
        change = AttemptChange(
            *key,
            fields.status,
            stored_text(fields.worker_id),
            fields.last_heartbeat_time,
            stored_payload(fields.metadata),
        )
        return attempt_of(await self.update_attempt_row(change))

    # Resources and workers

    @override
    async def add_resources(
        self, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        return await self._write_resources(None, resources, idempotency_key)

    @override
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        await self._pass_gate()
        return await self._write_resources(resources_id, resources, idempotency_key)

    async def _write_resources(
        self, resources_id: str | None, resources: NamedResources, key: IdempotencyKey | None
    ) -> ResourcesUpdate:
        # Checked, and copied: the record that is answered shares nothing with the caller's.
        draft = ResourcesUpdate(
            resources_id="-" if resources_id is None else resources_id,
            create_time=0.0,
            update_time=0.0,
            version=1,
            resources=resources,
        )
        note = note_of(key)

        async def recall(ids: list[str]) -> ResourcesUpdate:
            written = await self.get_resources_by_id(decode_text(ids[0]))
            if written is None:
                raise RecordNotFoundError("the resources that this key's call wrote are gone")
            return written

        return await self._once(
            note,
            lambda transaction: transaction.write_resources(resources_id, copied(draft).resources, note),
            recall,
        )

    @override
    async def beat_worker_row(self, beat: WorkerBeat) -> Row:
        return await self._lanes.beats(beat)

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        if heartbeat_stats is None:  # pyright: ignore[reportUnnecessaryComparison] - callers need not be typed
            raise TypeError("heartbeat_stats cannot be null")
        stats = (
            None if heartbeat_stats is UNSET else Worker(worker_id="-", heartbeat_stats=heartbeat_stats).heartbeat_stats
        )
        beat = WorkerBeat(encode_text(_IDENTIFIER.validate_python(worker_id)), stored_payload(stats))
        return worker_of(await self.beat_worker_row(beat))
