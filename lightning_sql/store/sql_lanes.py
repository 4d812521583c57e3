"""The native store on one event loop: its way to the database, and the calls that go together."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

from sqlalchemy import Connection, Executable, and_, select

from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    AttemptChanged,
    Claim,
    Enqueued,
    KeyNote,
    RolloutDraft,
    Row,
    SpanBatch,
    SpanDraft,
    SpanKey,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.engine import Database
from lightning_sql.database.native import ATTEMPT_COLUMNS, ATTEMPTS, ROLLOUT_COLUMNS, ROLLOUTS, raw_columns
from lightning_sql.database.payload import decode_text
from lightning_sql.database.reading import Reading
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import DatabaseUnavailableError, DuplicatedPrimaryKeyError
from lightning_sql.identifiers import new_attempt_id
from lightning_sql.metrics import CLAIMS, ENQUEUED, RETRIES, SPANS, Recorder
from lightning_sql.store.batching import Joiner
from lightning_sql.store.interface import Usage
from lightning_sql.store.measured import Statement, Statements
from lightning_sql.store.rows import queued_row, span_size
from lightning_sql.store.sql_writes import NativeTransaction

__all__ = ["Lanes", "RolloutBatch", "each_once"]

C = TypeVar("C")
R = TypeVar("R")

_WIDTH: Final = len(ROLLOUT_COLUMNS)
_PAGE_BYTES: Final = 4096
"""A call weighs 1, and 1 more for each so many bytes: a statement of weight 2000 has no more than 8 MB."""
_HEAVIEST: Final = 2000
_UNJOINED_LANES: Final = 16
_MOST_BREAKS: Final = 5
"""How often a claim is made again whose connection broke."""
_LIGHT: Final = 64
"""Up to this weight of spans, a second statement beside another takes more CPU than it saves time."""
_FEW_CLAIMS: Final = 7
"""Likewise for claims, of which each costs the database several rows."""
_FEW_ROLLOUTS: Final = 15
"""Likewise for rollouts that are enqueued, of which one costs its caller more than the database."""


_ENQUEUE: Final = Statement("enqueue", "enqueue_many_rollouts", ("rollouts", "rollout_queue"))
_CLAIM: Final = Statement("claim", "dequeue_many_rollouts", ("rollout_queue", "rollouts", "attempts", "workers"))
_ADD_SPANS: Final = Statement("add_spans", "add_many_spans", ("spans", "span_sequence_ids", "attempts", "rollouts"))
_UPDATE_ATTEMPTS: Final = Statement("update_attempts", "update_attempt", ("attempts", "rollouts", "workers"))
_ISSUE_NUMBERS: Final = Statement("issue_numbers", "get_many_span_sequence_ids", ("span_sequence_ids",))
_NUMBER_SPANS: Final = Statement("number_spans", "import_spans", ("span_sequence_ids", "attempts", "spans"))
_BEAT_WORKERS: Final = Statement("beat_workers", "update_worker", ("workers",))
_JOINED: Final = (_ENQUEUE, _CLAIM, _ADD_SPANS, _UPDATE_ATTEMPTS, _ISSUE_NUMBERS, _NUMBER_SPANS, _BEAT_WORKERS)


class RolloutBatch(NamedTuple):
    """The rollouts of one call."""

    drafts: Sequence[RolloutDraft]
    note: KeyNote | None
    """Written down with their ids."""


class Lanes:
    """What belongs to one event loop.

    Args:
        database: where the tables are.
        partition: which part of them.
        clock: seconds since the epoch; None is the database's own time.
        join: whether concurrent calls go together.
        claim_timeout: how many seconds nothing need be heard of an attempt after its claim; None is for ever.
        recorder: who takes down what goes to the database; None is nobody.
    """

    def __init__(
        self,
        database: Database,
        partition: str,
        clock: Callable[[], float] | None,
        *,
        join: bool,
        claim_timeout: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._claim_timeout = claim_timeout
        self._recorder = recorder
        self._statements = Statements(recorder, _JOINED)
        self._database = database
        self.partition = partition
        self._clock = clock
        self._join = join
        self.hot = database.hot_path(partition, join=join, claim_timeout=claim_timeout)
        self.enqueue: Joiner[RolloutBatch, Sequence[Row]] = self._joiner(
            _ENQUEUE.name,
            self._enqueue,
            weigh=_weigh_rollouts,
            # Whoever came first is to stand in the queue first.
            lanes=2 if self.hot.in_order else 1,
            alone=_FEW_ROLLOUTS,
        )
        self.claim: Joiner[Claim, Sequence[Row]] = self._joiner(
            _CLAIM.name,
            self._claim,
            keys=_worker_key,
            weigh=_weigh_claim,
            lanes=2,
            alone=_FEW_CLAIMS,
        )
        self.spans: Joiner[SpanBatch, Sequence[SpanOutcome]] = self._joiner(
            _ADD_SPANS.name, self._add_spans, keys=_span_keys, weigh=_weigh_spans, lanes=2, alone=_LIGHT
        )
        self.attempts: Joiner[AttemptChange, AttemptChanged | None] = self._joiner(
            _UPDATE_ATTEMPTS.name, self._update_attempts, keys=lambda change: (change.rollout_id,)
        )
        self.numbers: Joiner[Mapping[str, int], Mapping[str, int]] = self._joiner(
            _ISSUE_NUMBERS.name, self._issue_numbers
        )
        self.numbered: Joiner[Sequence[SpanKey], Sequence[int | None]] = self._joiner(
            _NUMBER_SPANS.name, self._number_spans, weigh=len
        )
        self.beats: Joiner[WorkerBeat, Row] = self._joiner(
            _BEAT_WORKERS.name, self._beat_workers, keys=lambda beat: (beat.worker_id,)
        )

    def _joiner(
        self,
        name: str,
        run: Callable[[list[C]], Awaitable[Sequence[R | Exception]]],
        *,
        keys: Callable[[C], Iterable[Hashable]] | None = None,
        weigh: Callable[[C], int] | None = None,
        lanes: int = 1,
        alone: int = 0,
    ) -> Joiner[C, R]:
        if not self._join:
            return Joiner(
                run, name=name, keys=keys, weigh=weigh, most=1, lanes=_UNJOINED_LANES, recovery=self._database.recovery
            )
        return Joiner(
            run,
            name=name,
            keys=keys,
            weigh=weigh,
            most=_HEAVIEST,
            lanes=lanes,
            alone=alone,
            recovery=self._database.recovery,
        )

    def now(self) -> float | None:
        """The time that statements are given; None lets the database look."""
        return None if self._clock is None else self._clock()

    async def instant(self) -> float:
        """The time, in seconds since the epoch."""
        now = self.now()
        if now is not None:
            return now
        clock = self.hot.clock()
        if clock is None:
            return time.time()
        [[instant]] = await self.fetch(select(clock), patient=False)
        return instant

    def usage(self) -> Usage:
        """What is asked of the database at this moment."""
        in_use, idle = self.hot.connections()
        return Usage(in_use, idle, {joiner.name: joiner.waiting for joiner in self._joiners})

    @property
    def _joiners(self) -> Sequence[Joiner[Any, Any]]:
        return self.enqueue, self.claim, self.spans, self.attempts, self.numbers, self.numbered, self.beats

    async def close(self) -> None:
        """Finish what was begun, without waiting for a database that is away, and close the connections."""
        self._database.stop_waiting()
        await asyncio.gather(*(joiner.close() for joiner in self._joiners))
        await self.hot.close()

    # Everything that is not joined

    async def fetch(self, statement: Executable, *, patient: bool = True) -> Sequence[Row]:
        """The rows of a statement that reads; without `patient`, it does not wait for a database that is away."""
        with self._statements.of_caller("fetch"):
            return await self._database.retried(
                lambda: self.hot.fetch(statement), repeatable=True, patient=lambda: patient
            )

    async def fetch_bounded(
        self, reading: Reading, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> tuple[Sequence[Row], bool]:
        """As `HotPath.fetch_bounded`."""
        with self._statements.of_caller("fetch_page"):
            return await self._database.retried(
                lambda: self.hot.fetch_bounded(reading, values, most_bytes, heavy), repeatable=True, reading=True
            )

    async def rollouts(self, rollout_ids: Sequence[str], *, finished: bool = False) -> list[Row]:
        """As `HotPath.rollouts`."""
        with self._statements.of_caller("rollouts_by_id"):
            return await self._database.retried(
                lambda: self.hot.rollouts(rollout_ids, finished), repeatable=True, reading=True
            )

    async def attempts_of(self, pairs: Sequence[tuple[str, str]]) -> list[Row]:
        """Rows of rollouts with a certain attempt, by the stored ids of both; those that there are, in order."""
        found: dict[str, Row] = {row[0]: row for row in await self.rollouts([rollout_id for rollout_id, _ in pairs])}
        rows: list[Row] = []
        for rollout_id, attempt_id in pairs:
            row = found.get(rollout_id)
            if row is not None and row[_WIDTH + 1] != attempt_id:  # there were others after it
                attempt = await self.fetch(
                    select(*raw_columns(ATTEMPTS, ATTEMPT_COLUMNS)).where(
                        ATTEMPTS.c[PARTITION] == self.partition,
                        ATTEMPTS.c.rollout_id == decode_text(rollout_id),
                        ATTEMPTS.c.attempt_id == decode_text(attempt_id),
                    )
                )
                row = (*row[:_WIDTH], *attempt[0]) if attempt else None
            if row is not None:
                rows.append(row)
        return rows

    async def refresh_statistics(self) -> Sequence[str]:
        """As `HotPath.refresh_statistics`."""
        return await self._database.retried(self.hot.refresh_statistics, repeatable=True, patient=lambda: False)

    async def write(self, work: Callable[[NativeTransaction], R], *, patient: bool = True) -> R:
        """Run a transaction to its end, even if the caller is cancelled: what was sent is not half sent."""

        def run(connection: Connection) -> R:
            with self._database.translated():
                return work(
                    NativeTransaction(
                        connection,
                        self.hot,
                        self._database.dialect,
                        self.partition,
                        self.now(),
                        self._claim_timeout,
                    )
                )

        async def attempt() -> R:
            try:
                with self._database.translated():
                    return await self.hot.write(run)
            except CommitUnknownError as error:
                unknown = error
            if (took_place := await self._told(unknown, lambda: self.hot.took_place(unknown))) is None:
                raise unknown
            if not took_place:
                raise DatabaseUnavailableError from unknown  # to be run again
            return cast(R, unknown.result)

        with self._statements.of_caller("transaction"):
            return await self._database.run(attempt, patient=patient)

    # What joins

    async def _enqueue(self, batches: list[RolloutBatch]) -> list[Sequence[Row] | Exception]:
        with self._statements.timed(_ENQUEUE, len(batches)):
            rows = await self._enqueued(batches)
        if self._recorder is not None:
            self._recorder.count(ENQUEUED, amount=len(rows))
        given = iter(rows)
        return [[next(given) for _ in batch.drafts] for batch in batches]

    async def _enqueued(self, batches: Sequence[RolloutBatch]) -> Sequence[Row]:
        """Queue rollouts, once, also when the connection breaks and nobody says whether it took place.

        Their ids were made before, so that it can be done again: where the first time was one, it is a duplicate.
        """
        drafts = [draft for batch in batches for draft in batch.drafts]
        notes = [(batch.note, _ids_text(batch.drafts)) for batch in batches if batch.note is not None]
        unknown = False

        async def enqueue() -> Enqueued:
            nonlocal unknown
            try:
                return await self.hot.enqueue(drafts, self.now(), notes)
            except CommitUnknownError:
                unknown = True
                raise

        try:
            # Until it was sent, others see to it that it waits for a database that is away.
            added = await self._database.retried(enqueue, repeatable=True, patient=lambda: unknown)
        except DatabaseUnavailableError as error:
            if unknown and not isinstance(error, CommitUnknownError):
                raise CommitUnknownError from error
            raise
        except DuplicatedPrimaryKeyError:
            if not unknown:
                raise
            ids = [draft.rollout_id for draft in drafts]
            found = await self._told(CommitUnknownError(), lambda: self.hot.rollouts(ids, False))
            rows = {row[0]: row[:_WIDTH] for row in found}
            if len(rows) < len(drafts):  # somebody else's key it was
                raise
            return [rows[rollout_id] for rollout_id in ids]
        return [queued_row(draft, added.now, added.resources_id) for draft in drafts]

    async def _claim(self, claims: list[Claim]) -> list[Sequence[Row] | Exception]:
        with self._statements.timed(_CLAIM, len(claims)):
            now, given = await self._claimed(claims)
        if self._recorder is not None:
            numbers = [row[_WIDTH + 1] for rows in given for row in rows]
            self._recorder.count(CLAIMS, amount=len(numbers))
            self._recorder.count(RETRIES, amount=sum(number > 1 for number in numbers))
        return [
            [
                (
                    *row[:_WIDTH],
                    row[0],
                    row[_WIDTH],
                    row[_WIDTH + 1],
                    now,
                    None,
                    "preparing",
                    claim.worker_id,
                    None,
                    None,
                )
                for row in rows
            ]
            for claim, rows in zip(claims, given, strict=True)
        ]

    async def _claimed(self, claims: list[Claim]) -> tuple[float, list[list[Row]]]:
        """As `HotPath.claim`; when a connection breaks, it is found out whether the claims took place."""
        breaks = 0
        while True:
            try:
                return await self._once(lambda: self.hot.claim(claims, self.now()))  # noqa: B023 - called here
            except CommitUnknownError as error:
                breaks += 1
                unknown = error
            if breaks == _MOST_BREAKS or not await self._told(unknown, lambda: self.hot.is_over(unknown)):  # noqa: B023
                raise unknown
            given = await self._given_out(claims, unknown)
            if given is not None:
                return given
            # Not under the same ids: what the watchdog has taken back meanwhile has attempts of these.
            claims = [claim._replace(attempt_ids=[new_attempt_id() for _ in claim.attempt_ids]) for claim in claims]

    async def _given_out(
        self, claims: Sequence[Claim], unknown: CommitUnknownError
    ) -> tuple[float, list[list[Row]]] | None:
        """What claims got whose statement is over; None if they got nothing, or nothing that still is theirs.

        Nobody knows of these attempts yet. So what is found is what the claims got, and an attempt that is not
        found was never made, or the watchdog ended it.
        """
        wanted = {decode_text(id_): claim.worker_id for claim in claims for id_ in claim.attempt_ids}
        statement = (
            select(
                *raw_columns(ROLLOUTS, ROLLOUT_COLUMNS),
                *raw_columns(ATTEMPTS, ("attempt_id", "sequence_id", "worker_id", "start_time")),
            )
            .join_from(
                ROLLOUTS,
                ATTEMPTS,
                and_(
                    ATTEMPTS.c[PARTITION] == ROLLOUTS.c[PARTITION],
                    ATTEMPTS.c.rollout_id == ROLLOUTS.c.rollout_id,
                    ATTEMPTS.c.sequence_id == ROLLOUTS.c.attempt_count,
                ),
            )
            # Few are being prepared at any time, whereas attempts have no index by their ids alone.
            .where(
                ROLLOUTS.c[PARTITION] == self.partition,
                ROLLOUTS.c.status == "preparing",
                ATTEMPTS.c.attempt_id.in_(wanted),
            )
        )
        rows = await self._told(unknown, lambda: self.hot.fetch(statement))
        found = {row[_WIDTH]: row for row in rows if row[_WIDTH + 2] == wanted.get(row[_WIDTH])}
        if not found:
            return None
        given = [[found[id_][: _WIDTH + 2] for id_ in claim.attempt_ids if id_ in found] for claim in claims]
        return max(row[_WIDTH + 3] for row in found.values()), given

    async def _add_spans(self, batches: list[SpanBatch]) -> Sequence[Sequence[SpanOutcome] | Exception]:
        with self._statements.timed(_ADD_SPANS, len(batches)):
            outcomes = await self._repeatedly(lambda: self.hot.add_spans(batches, self.now()))
        if self._recorder is not None:
            self._recorder.count(SPANS, amount=sum(map(_stored, outcomes)))
        return outcomes

    async def _update_attempts(self, changes: list[AttemptChange]) -> Sequence[AttemptChanged | None | Exception]:
        with self._statements.timed(_UPDATE_ATTEMPTS, len(changes)):
            return await self._updated(changes)

    async def _updated(self, changes: list[AttemptChange]) -> Sequence[AttemptChanged | None | Exception]:
        breaks = 0
        while True:
            try:
                return await self._once(lambda: self.hot.update_attempts(changes, self.now()))
            except CommitUnknownError as error:
                breaks += 1
                unknown = error
            # The latest attempt may be another one by now. And the first statement, if it is still at work, must not
            # come after this one: somebody may have changed the attempt again by then.
            latest = any(change.attempt_id is None for change in changes)
            if latest or breaks == _MOST_BREAKS or not await self._told(unknown, lambda: self.hot.is_over(unknown)):  # noqa: B023
                raise unknown

    async def _issue_numbers(self, calls: list[Mapping[str, int]]) -> list[Mapping[str, int] | Exception]:
        wanted: Counter[str] = Counter()
        for call in calls:
            wanted.update(call)
        with self._statements.timed(_ISSUE_NUMBERS, len(calls)):
            last = await self._repeatedly(lambda: self.hot.issue_numbers(wanted))
        issued = {rollout_id: last[rollout_id] - count for rollout_id, count in wanted.items()}
        answers: list[Mapping[str, int] | Exception] = []
        for call in calls:
            for rollout_id, count in call.items():
                issued[rollout_id] += count
            answers.append({rollout_id: issued[rollout_id] for rollout_id in call})
        return answers

    async def _number_spans(self, calls: list[Sequence[SpanKey]]) -> list[Sequence[int | None] | Exception]:
        spans = [span for call in calls for span in call]
        with self._statements.timed(_NUMBER_SPANS, len(calls)):
            numbers = iter(await self._repeatedly(lambda: self.hot.number_spans(spans)))
        return [[next(numbers) for _ in call] for call in calls]

    async def _beat_workers(self, beats: list[WorkerBeat]) -> Sequence[Row | Exception]:
        with self._statements.timed(_BEAT_WORKERS, len(beats)):
            return await self._repeatedly(lambda: self.hot.beat_workers(beats, self.now()))

    async def _told(self, unknown: CommitUnknownError, ask: Callable[[], Awaitable[R]]) -> R:
        """What the database says of a write whose connection broke, as soon as it is back.

        Raises:
            CommitUnknownError: it does not come back in time; nobody must take the write for undone.
        """
        try:
            return await self._database.retried(ask, repeatable=True)
        except DatabaseUnavailableError as error:
            raise unknown from error

    async def _once(self, call: Callable[[], Awaitable[R]]) -> R:
        """A statement whose caller waits for a database that is away, and sends it again."""
        return await self._database.retried(call, repeatable=False, patient=_impatient)

    async def _repeatedly(self, call: Callable[[], Awaitable[R]]) -> R:
        """As `_once`, of a statement that may be sent again also when nobody knows whether it took place."""
        try:
            return await self._database.retried(call, repeatable=True, patient=_impatient)
        except CommitUnknownError as error:
            raise DatabaseUnavailableError from error


def _stored(outcomes: Sequence[SpanOutcome] | Exception) -> int:
    return 0 if isinstance(outcomes, Exception) else outcomes.count(SpanOutcome.STORED)


def _impatient() -> bool:
    return False


def _worker_key(claim: Claim) -> tuple[str, ...]:
    return (claim.worker_id,) if claim.worker_id else ()


def _weigh_claim(claim: Claim) -> int:
    return len(claim.attempt_ids)


def _span_key(span: SpanDraft) -> str:
    # One text, whose hash is worked out once; no stored text has NUL in it.
    return f"{span.rollout_id}\0{span.attempt_id}\0{span.span_id}"


def _as_they_are(outcomes: Sequence[SpanOutcome]) -> Sequence[SpanOutcome]:
    return outcomes


def each_once(
    spans: Sequence[SpanDraft],
) -> tuple[Sequence[SpanDraft], Callable[[Sequence[SpanOutcome]], Sequence[SpanOutcome]]]:
    """The first of equal spans, in order, and what makes of their outcomes those of all."""
    if len(spans) == 1:
        return spans, _as_they_are
    keys = [_span_key(span) for span in spans]
    first = dict(zip(reversed(keys), reversed(spans), strict=True))
    if len(first) == len(spans):
        return spans, _as_they_are
    batch = [span for key, span in zip(keys, spans, strict=True) if first[key] is span]

    def spread(outcomes: Sequence[SpanOutcome]) -> Sequence[SpanOutcome]:
        known = {_span_key(span): outcome for span, outcome in zip(batch, outcomes, strict=True)}
        return [
            SpanOutcome.DUPLICATE if first[key] is not span and known[key] is SpanOutcome.STORED else known[key]
            for key, span in zip(keys, spans, strict=True)
        ]

    return batch, spread


def _span_keys(batch: SpanBatch) -> list[str]:
    return [_span_key(span) for span in batch.spans]


def _size(*texts: str | None) -> int:
    size = 0
    for text in texts:
        if text is not None:
            size += len(text)
    return 1 + size // _PAGE_BYTES


def _ids_text(drafts: Sequence[RolloutDraft]) -> str:
    return json.dumps([draft.rollout_id for draft in drafts])


def _weigh_rollouts(batch: RolloutBatch) -> int:
    weight = 0
    for draft in batch.drafts:
        weight += _size(draft.input, draft.metadata)
    return weight


def _weigh_spans(batch: SpanBatch) -> int:
    weight = 0
    for span in batch.spans:
        weight += 1 + span_size(span) // _PAGE_BYTES
    return weight
