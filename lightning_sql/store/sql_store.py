"""The native store: the database does the work, one statement an operation, concurrent calls joined."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast, get_args
from weakref import WeakKeyDictionary

from pydantic import BaseModel, TypeAdapter
from sqlalchemy import func, select
from typing_extensions import override

from lightning_sql import lifecycle
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    Claim,
    RolloutDraft,
    Row,
    SpanBatch,
    SpanDraft,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.engine import Database
from lightning_sql.database.native import ROLLOUT_COLUMNS, ROLLOUTS
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.identifiers import new_attempt_id
from lightning_sql.jsonable import copied
from lightning_sql.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Identifier,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Seconds,
    Span,
    Unset,
    Worker,
    given,
    is_plain_identifier,
)
from lightning_sql.store.interface import SpanReceipt, StoreCapabilities, refuse_null
from lightning_sql.store.rows import (
    attempt_of,
    attempted_of,
    plain_request,
    rollout_draft,
    rollout_of,
    span_draft,
    stored_payload,
    stored_text,
    worker_of,
)
from lightning_sql.store.sql_lanes import Lanes, each_once
from lightning_sql.store.sql_loop import OfLoop
from lightning_sql.store.sql_reads import SqlReads
from lightning_sql.store.sql_writes import NativeTransaction
from lightning_sql.store.transaction import LATEST
from lightning_sql.store.waiting import FinishWatcher

__all__ = ["SqlStore"]

logger: Final = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.1
"""How often the database is asked whether another process finished a rollout that somebody here waits for."""
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


class SqlStore(SqlReads):
    """The store on its own tables in a database.

    Args:
        database: the database, its schema up to date; closed with the store.
        partition: one training run, or one tenant.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger; 0 scans before every call.
        clock: seconds since the epoch, for tests; by default the time is the database's.
        join: whether concurrent calls of one kind go to the database together.
    """

    def __init__(
        self,
        database: Database,
        *,
        partition: str = "default",
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] | None = None,
        join: bool = True,
    ) -> None:
        super().__init__(database.dialect, partition)
        self._database = database
        self._scan_debounce_seconds = scan_debounce_seconds
        self._clock = clock
        self._join = join
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, OfLoop] = WeakKeyDictionary()
        self._latest: tuple[asyncio.AbstractEventLoop, OfLoop] | None = None

    def __repr__(self) -> str:
        return f"<SqlStore of {self._partition!r} in {self._database!r}>"

    @property
    def _here(self) -> OfLoop:
        loop = asyncio.get_running_loop()
        if self._latest is not None and self._latest[0] is loop:
            return self._latest[1]
        here = self._loops.get(loop)
        if here is None:
            here = self._loops[loop] = OfLoop(
                Lanes(self._database, self._partition, self._clock, join=self._join),
                FinishWatcher(self._find_finished, POLL_SECONDS),
                sweep=self.sweep,
                maintain=self.maintain,
                debounce_seconds=self._scan_debounce_seconds,
                clock=self._clock or time.monotonic,
            )
        self._latest = loop, here
        return here

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
        here = self._loops.get(asyncio.get_running_loop())
        if here is not None:
            await here.close()
            self._loops.pop(asyncio.get_running_loop(), None)
            self._latest = None
        await self._database.close()

    @override
    async def release_waiters(self) -> None:
        await self._watcher.close()

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": False, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    @override
    async def maintain(self) -> None:
        for name in await self._lanes.refresh_statistics():
            logger.debug("the database looked at %s, which has grown", name)

    # Watchdog

    @override
    async def sweep(self) -> int:
        here = self._here
        ended = 0
        while await self._anything_due(here.lanes):
            swept = await here.lanes.write(NativeTransaction.sweep)
            ended += swept.ended
            here.watcher.announce(map(decode_text, swept.finished))
            if not swept.more:
                break
        return ended

    async def _anything_due(self, lanes: Lanes) -> bool:
        clock = lanes.hot.clock()
        now = lanes.now()
        instant: Any = now if now is not None else time.time() if clock is None else clock
        due = select(ROLLOUTS.c.watch_at).where(
            ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.watch_at.is_not(None), ROLLOUTS.c.watch_at <= instant
        )
        return bool(await lanes.fetch(due.limit(1)))

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
    ) -> AttemptedRollout:
        await self._pass_gate()
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        return await self._lanes.write(lambda transaction: transaction.start_rollout(request, worker_id))

    @override
    async def enqueue_rows(self, drafts: Sequence[RolloutDraft]) -> Sequence[Row]:
        here = await self._through_gate()
        return await here.lanes.enqueue(drafts) if drafts else []

    @override
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        request = plain_request(input, mode, resources_id, config, metadata)
        [row] = await self.enqueue_rows([rollout_draft(request)])
        return rollout_of(row)

    @override
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        rows = await self.enqueue_rows([rollout_draft(request) for request in rollouts])
        return [rollout_of(row) for row in rows]

    @override
    async def claim_rows(self, limit: int, worker_id: str | None) -> Sequence[Row]:
        here = await self._through_gate()
        if limit > CLAIM_AT_ONCE:
            limit = await self._queued(min(limit, MOST_QUEUED))
        if limit <= 0 and not worker_id:
            return []
        attempt_ids = [new_attempt_id() for _ in range(limit)]
        return await here.lanes.claim(Claim(stored_text(worker_id), attempt_ids))

    async def _queued(self, most: int) -> int:
        """How many rollouts are in the queue, counted up to `most`."""
        queued = (
            select(ROLLOUTS.c.queue_position)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.queue_position.is_not(None))
            .limit(most)
            .subquery()
        )
        [[count]] = await self._lanes.fetch(select(func.count()).select_from(queued))
        return count

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    @override
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            await self._pass_gate()
            return []
        if worker_id is not None and not is_plain_identifier(worker_id):
            _IDENTIFIER.validate_python(worker_id)
        rows = await self.claim_rows(limit, worker_id)
        return [attempted_of(row, attempt_of(row[_WIDTH:])) for row in rows]

    @override
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        await self._pass_gate()
        return await self._lanes.write(lambda transaction: transaction.start_attempt(rollout_id, worker_id))

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
        here = self._here
        rollout = await here.lanes.write(lambda transaction: transaction.update_rollout(rollout_id, changes))
        if "status" in changes and lifecycle.is_finished(rollout.status):
            here.watcher.announce([rollout_id])
        return rollout

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

    # Spans

    @override
    async def add_span_rows(self, spans: Sequence[SpanDraft], *, strict: bool) -> Sequence[SpanOutcome]:
        if not spans:
            return []
        batch, spread = each_once(spans)
        outcomes = await self._lanes.spans(SpanBatch(batch, strict))
        if strict and SpanOutcome.UNKNOWN in outcomes:
            lost = batch[outcomes.index(SpanOutcome.UNKNOWN)]
            raise RecordNotFoundError(
                f"there is no attempt {decode_text(lost.attempt_id)!r:.200} "
                f"of a rollout {decode_text(lost.rollout_id)!r:.200}"
            )
        return spread(outcomes)

    @override
    async def add_span(self, span: Span) -> Span | None:
        stored = await self.add_many_spans([span])
        return stored[0] if stored else None

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        outcomes = await self.add_span_rows([span_draft(span) for span in spans], strict=True)
        return [span for span, outcome in zip(spans, outcomes, strict=True) if outcome is SpanOutcome.STORED]

    @override
    async def import_spans(self, spans: Sequence[Span], *, unnumbered: AbstractSet[int] = frozenset()) -> SpanReceipt:
        numbered = await self._numbered(spans, unnumbered)
        outcomes = await self.add_span_rows([span_draft(span) for span in numbered], strict=False)
        pairs = list(zip(numbered, outcomes, strict=True))
        return SpanReceipt(
            [span for span, outcome in pairs if outcome is SpanOutcome.STORED],
            sum(outcome is SpanOutcome.DUPLICATE for outcome in outcomes),
            [span for span, outcome in pairs if outcome is SpanOutcome.UNKNOWN],
        )

    async def _numbered(self, spans: Sequence[Span], unnumbered: AbstractSet[int]) -> list[Span]:
        """The spans, those without a number that can be stored as new with the next ones of their rollout.

        Numbers are issued before the spans are stored, so a span that turns out to be stored by somebody
        else leaves a gap, which is allowed.
        """
        answer = list(spans)
        first: dict[tuple[str, str, str], int] = {}
        for index, span in enumerate(spans):
            key = (encode_text(span.rollout_id), encode_text(span.attempt_id), encode_text(span.span_id))
            first.setdefault(key, index)
        wanted = {key: index for key, index in first.items() if index in unnumbered}
        if not wanted:
            return answer
        fresh = await self._lanes.new_spans(list(wanted))
        places = [index for index, new in zip(wanted.values(), fresh, strict=True) if new]
        pairs = [(spans[index].rollout_id, spans[index].attempt_id) for index in places]
        for index, number in zip(places, await self.get_many_span_sequence_ids(pairs), strict=True):
            answer[index] = spans[index].model_copy(update={"sequence_id": number})
        return answer

    @override
    async def next_number(self, rollout_id: str) -> int:
        key = encode_text(rollout_id)
        return (await self._lanes.numbers({key: 1}))[key]

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self.next_number(rollout_id)

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not rollout_attempt_ids:
            return []
        keys = [encode_text(rollout_id) for rollout_id, _ in rollout_attempt_ids]
        counts = Counter(keys)
        last = await self._lanes.numbers(counts)
        following = {key: last[key] - count for key, count in counts.items()}
        numbers: list[int] = []
        for key in keys:
            following[key] += 1
            numbers.append(following[key])
        return numbers

    # Resources and workers

    @override
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self._write_resources(None, resources)

    @override
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        await self._pass_gate()
        return await self._write_resources(resources_id, resources)

    async def _write_resources(self, resources_id: str | None, resources: NamedResources) -> ResourcesUpdate:
        # Checked, and copied: the record that is answered shares nothing with the caller's.
        draft = ResourcesUpdate(
            resources_id="-" if resources_id is None else resources_id,
            create_time=0.0,
            update_time=0.0,
            version=1,
            resources=resources,
        )
        return await self._lanes.write(
            lambda transaction: transaction.write_resources(resources_id, copied(draft).resources)
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
